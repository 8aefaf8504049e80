"""What a campaign does, and when: a list that is computed from its seed before anything begins."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STALE = 4.0  # stale_seconds of the campaign's workers


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
Fault = Callable[[Draw, float, int], list[Action]]


def _once(name: str) -> Fault:
    return lambda draw, at, workers: [Action(at, name, -1, draw.randrange(1 << 30))]


def _of_worker(name: str) -> Fault:
    return lambda draw, at, workers: [Action(at, name, draw.randrange(workers), draw.randrange(1 << 30))]


def _between(name: str, undo: str, shortest: float, longest: float, *, one: bool) -> Fault:
    def make(draw: Draw, at: float, workers: int) -> list[Action]:
        worker = draw.randrange(workers) if one else -1
        end = at + draw.uniform(shortest, longest)
        return [Action(at, name, worker), Action(end, undo, worker)]

    return make


BOTH: dict[str, Fault] = {
    "kill_worker": _of_worker("kill_worker"),
    "kill_engine": _of_worker("kill_engine"),
    "terminate": _of_worker("terminate"),
    "freeze": _between("freeze", "thaw", STALE + 1, STALE + 4, one=True),
    "pause_all": _between("freeze", "thaw", STALE + 1, STALE + 3, one=False),
    "hang_engine": _between("hang_engine", "thaw", 14.0, 20.0, one=True),
    "redis_kill": _between("redis_kill", "redis_start", 0.5, 5.0, one=False),
    "redis_flush": _once("redis_flush"),
    "redis_pause": _between("redis_pause", "redis_continue", 3.0, 15.0, one=False),
    "poison": _once("poison"),
    "hostile_chat": _once("hostile_chat"),
    "hostile_request": _once("hostile_request"),
    "unreadable": _once("unreadable"),
    "forged_messages": _once("forged_messages"),
    "forking_client": _once("forking_client"),
    "batch_games": _once("batch_games"),
    "prune": _once("prune"),
    "cancel_and_retry": _once("cancel_and_retry"),
}
ONLY = {
    "postgresql": {
        "restart_fast": _once("restart_fast"),
        "restart_immediate": _once("restart_immediate"),
        "drop_connections": _once("drop_connections"),
        "clock_step": _between("clock_step", "clock_right", 4.0, 8.0, one=True),
    },
    "sqlite": {
        "write_lock": _between("write_lock", "write_unlock", 1.0, 4.0, one=False),
        "disk_full": _between("disk_full", "disk_free", 1.0, 4.0, one=True),
    },
}
COMMON = ("kill_worker", "kill_engine", "cancel_and_retry", "batch_games")  # these come twice in a round


def make_plan(seed: int, part: str, seconds: float, workers: int) -> list[Action]:
    """Faults of every kind in a random order, then again, until the time is used."""
    draw = random.Random(f"{seed} {part}")
    kinds = BOTH | ONLY[part]
    actions: list[Action] = []
    at = 2.0
    while at < seconds:
        names = [*kinds, *COMMON]
        draw.shuffle(names)
        for name in names:
            if at >= seconds:
                break
            actions += kinds[name](draw, at, workers)
            at += draw.uniform(0.4, 2.4)
    return sorted(actions)


def describe(plan: Sequence[Action]) -> str:
    """A line an action."""
    return "\n".join(map(str, plan))
