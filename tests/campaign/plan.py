"""What a campaign does, and when: a list that is computed from its seed before anything begins."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STALE = 4.0  # stale_seconds of the campaign's workers
SHORTEST_HANG, LONGEST_HANG = 1.0, 60.0
SHARE_OF_A_HANG = 0.3  # of the time that there is for faults: a short campaign has short hangs only
SERVERS = 2  # HTTP servers, side by side


@dataclass(frozen=True, order=True)
class Action:
    """`name` is a method of `Faults`; `worker` counts from 0."""

    at: float  # seconds after the part began
    name: str
    worker: int = -1
    number: int = 0  # what else the action needs to know, drawn from the seed

    def __str__(self) -> str:
        whose = f" worker {self.worker}" if self.worker >= 0 else ""
        return f"{self.at:7.2f} s  {self.name}{whose} ({self.number})"


Draw = random.Random


@dataclass(frozen=True)
class Scale:
    """What a fault is fitted to."""

    workers: int
    longest: float  # seconds that something hangs


Fault = Callable[[Draw, float, Scale], list[Action]]


def _once(name: str) -> Fault:
    return lambda draw, at, scale: [Action(at, name, -1, draw.randrange(1 << 30))]


def _of_worker(name: str) -> Fault:
    return lambda draw, at, scale: [Action(at, name, draw.randrange(scale.workers), draw.randrange(1 << 30))]


def _of_server(name: str) -> Fault:
    return lambda draw, at, scale: [Action(at, name, draw.randrange(SERVERS), draw.randrange(1 << 30))]


def _between(name: str, undo: str, shortest: float, longest: float, *, of: str = "") -> Fault:
    """A fault that is undone after a while. `of`: one worker, one server, or nobody's."""

    def make(draw: Draw, at: float, scale: Scale) -> list[Action]:
        one = {"worker": scale.workers, "server": SERVERS}.get(of)
        who = -1 if one is None else draw.randrange(one)
        end = at + draw.uniform(shortest, longest)
        number = draw.randrange(1 << 30)
        return [Action(at, name, who, number), Action(end, undo, who, number)]

    return make


def _hang(name: str, undo: str, *, of: str = "") -> Fault:
    """A fault of 1 to 60 s, short ones more often. In every second one, somebody is asked to end in it."""

    def make(draw: Draw, at: float, scale: Scale) -> list[Action]:
        shortest = math.log(SHORTEST_HANG)
        lasts = math.exp(draw.uniform(shortest, max(shortest, math.log(scale.longest))))
        actions = _between(name, undo, lasts, lasts, of=of)(draw, at, scale)
        ending = draw.choice((_of_worker("terminate"), _of_server("terminate_server")))
        asked = ending(draw, at + min(1.0, lasts / 2), scale)
        return actions + (asked if draw.random() < 0.5 else [])

    return make


BOTH: dict[str, Fault] = {
    "kill_worker": _of_worker("kill_worker"),
    "kill_engine": _of_worker("kill_engine"),
    "kill_server": _of_server("kill_server"),
    "terminate": _of_worker("terminate"),
    "terminate_server": _of_server("terminate_server"),
    "freeze": _between("freeze", "thaw", STALE + 1, STALE + 4, of="worker"),
    "freeze_long": _hang("freeze", "thaw", of="worker"),
    "freeze_server": _hang("freeze_server", "thaw_server", of="server"),
    "pause_all": _between("freeze", "thaw", STALE + 1, STALE + 3),
    "hang_engine": _hang("hang_engine", "continue_engine", of="worker"),
    "sleep": _between("sleep", "wake", 2.0, 10.0),
    "redis_kill": _between("redis_kill", "redis_start", 0.5, 5.0),
    "redis_flush": _once("redis_flush"),
    "redis_pause": _hang("redis_pause", "redis_continue"),
    "redis_deaf": _hang("redis_deaf", "redis_hears"),
    "redis_freeze": _hang("redis_freeze", "redis_hears"),
    "folder_gone": _between("folder_gone", "folder_back", 0.2, 2.0),
    "folder_stale": _between("folder_stale", "folder_fresh", 0.2, 2.0),
    "disk_full": _between("disk_full", "disk_free", 1.0, 6.0),
    "clock_step": _between("clock_step", "clock_right", 2.0, 8.0),
    "poison": _once("poison"),
    "hostile_chat": _once("hostile_chat"),
    "hostile_request": _once("hostile_request"),
    "unreadable": _once("unreadable"),
    "forged_messages": _once("forged_messages"),
    "forking_client": _once("forking_client"),
    "batch_games": _once("batch_games"),
    "chain_games": _once("chain_games"),
    "prune": _once("prune"),
    "cancel_and_retry": _once("cancel_and_retry"),
}
ONLY = {
    "postgresql": {
        "restart_fast": _once("restart_fast"),
        "restart_immediate": _once("restart_immediate"),
        "drop_connections": _once("drop_connections"),
        "postgres_pause": _hang("postgres_pause", "postgres_continue"),
        "postgres_deaf": _hang("postgres_deaf", "postgres_hears"),
        "postgres_freeze": _hang("postgres_freeze", "postgres_hears"),
        "host_clock": _between("host_clock", "host_clock_right", 4.0, 8.0, of="worker"),
    },
    "sqlite": {
        "write_lock": _between("write_lock", "write_unlock", 1.0, 4.0),
        "file_limit": _between("file_limit", "file_unlimited", 1.0, 4.0, of="worker"),
    },
}
# These come twice in a round.
COMMON = (
    *("kill_worker", "kill_engine", "kill_server", "sleep", "cancel_and_retry", "batch_games", "chain_games"),
)
KILLS = frozenset(
    {"kill_worker", "kill_engine", "kill_server", "terminate", "terminate_server"}
    | {
        "kill_run",
        "kill_all",
        "interrupt",
        "redis_kill",
        "restart_fast",
        "restart_immediate",
        "drop_connections",
    }
)
"""Actions that end a process or its connections."""
HANGS = frozenset(
    {
        "hang_run",
        "hang_worker",
        "hang_redis",
        "freeze",
        "freeze_server",
        "hang_engine",
        "redis_pause",
        "redis_deaf",
        "redis_freeze",
    }
    | {"postgres_pause", "postgres_deaf", "postgres_freeze", "write_lock"}
)
"""Actions after which something stands still, and answers nobody."""
OF_SERVERS = frozenset(name for name in HANGS if name.startswith(("redis_", "postgres_", "write_")))
"""Those of which every worker may notice something."""
ENDINGS = ("redis_pause", "redis_deaf", "redis_freeze", "hang_engine", "postgres_pause", "postgres_deaf")
"""What hangs at the end of a night, when everybody is asked to end."""


def make_plan(seed: int, part: str, seconds: float, workers: int) -> list[Action]:
    """Faults of every kind in a random order, then again, until the time is used."""
    draw = random.Random(f"{seed} {part}")
    kinds = BOTH | ONLY[part]
    scale = Scale(workers, min(LONGEST_HANG, max(SHORTEST_HANG, seconds * SHARE_OF_A_HANG)))
    actions: list[Action] = []
    at = 2.0
    while at < seconds:
        names = [*kinds, *COMMON]
        draw.shuffle(names)
        for name in names:
            if at >= seconds:
                break
            actions += kinds[name](draw, at, scale)
            at += draw.uniform(0.4, 2.4)
    return sorted(actions)


def last_hang(seed: int, part: str) -> Action:
    """What hangs while everybody is asked to end, at the end of a night."""
    draw = random.Random(f"{seed} {part} end")
    names = [name for name in ENDINGS if part == "postgresql" or not name.startswith("postgres_")]
    return Action(0.0, draw.choice(names), -1, draw.randrange(1 << 30))


def kinds(part: str) -> frozenset[str]:
    """The names of all actions of a part that are faults, not their ends."""
    draw, scale = random.Random(0), Scale(1, 1.0)
    return frozenset(min(make(draw, 0.0, scale)).name for make in (BOTH | ONLY[part]).values())


FAULTS = frozenset().union(*map(kinds, ONLY))
"""The names of all of them."""


def describe(plan: Sequence[Action]) -> str:
    """A line an action."""
    return "\n".join(map(str, plan))
