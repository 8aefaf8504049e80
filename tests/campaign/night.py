"""A night under fire: workers, traffic, the plan's faults; then peace, and the judgement."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import redis

from tests.campaign import clocks, history
from tests.campaign.faults import Faults
from tests.campaign.fleet import Fleet
from tests.campaign.http_traffic import HttpTraffic
from tests.campaign.lateness import Late, Watchdog, lost
from tests.campaign.ledger import Ledger
from tests.campaign.oracle import Evidence, judge
from tests.campaign.plan import OF_SERVERS, Action, kinds, last_hang, make_plan
from tests.campaign.promptness import Timing, judge_time
from tests.campaign.report import Report
from tests.campaign.traffic import Traffic
from tests.campaign.world import World

WORKERS = 3
SETTLE_SECONDS = 90.0  # of a long night, what is left for its end
STUCK_SECONDS = 60.0  # after the last fault, some job must end in every such time until all have
QUIET_SECONDS = 20.0  # and then no message is left
RESTARTS_A_POISON = 10  # with 24 jobs in hand: 5 to find it among them, 3 attempts, 2 where others fall in
CLOCK_TRUST_SECONDS = 330.0  # a process counts on from a clock that it has read, for five minutes
SHARE_OF_FAULTS = 0.6  # of the time of a night; the rest is for settling


def fault_seconds(seconds: float) -> float:
    """How much of a night's time is for faults."""
    return max(10.0, seconds * SHARE_OF_FAULTS, seconds - SETTLE_SECONDS)


def run(database: str, seed: int, seconds: float, report: Report) -> None:
    """One night on `database`. What it leaves behind is kept where a rule was broken."""
    plan = [
        action
        for action in make_plan(seed, database, fault_seconds(seconds), WORKERS)
        if action.name not in report.without
    ]
    report.planned(kinds(database) - report.without)
    violations = len(report.violations)
    with (
        Watchdog() as watchdog,
        World(database) as world,
        _host_clock(world),
        Fleet(world, WORKERS, report, watchdog.lateness) as fleet,
        Ledger(world.home) as ledger,
    ):
        fleet.wait_until_ready()
        traffic = Traffic(world, ledger, report, seed)
        http = HttpTraffic(fleet, ledger, report, seed)
        faults = Faults(world, fleet, ledger, report)
        began = time.monotonic()
        for action in plan:
            while (left := began + action.at - time.monotonic()) > 0:
                time.sleep(min(left, 1.0))
                report.progress(f"{len(ledger.promises)} jobs acknowledged, last {report.step}")
            faults.carry_out(action)
        traffic.stop()
        http.stop()
        faults.undo_all()
        report.step = "the last fault"
        _bring_forward(world)
        settled = settle(world, report, watchdog.lateness)
        _look_for_messages(world, report)
        http.check_batches()
        http.close()
        _end_beside_a_hang(faults, fleet, last_hang(seed, database))
        _judge(world, ledger, report, settled=settled)
        _judge_time(ledger, fleet, watchdog, report)
        _count_restarts(report)
        _read_logs(fleet, report)
    if len(report.violations) > violations:
        print(f"\nKept for a closer look: {world.home}")
    else:
        shutil.rmtree(world.home, ignore_errors=True)


@contextmanager
def _host_clock(world: World) -> Iterator[None]:
    """The campaign's own clients are on the host whose clock is set wrong, where that is the database's."""
    if world.database != "sqlite":
        yield
        return
    clocks.install()
    os.environ["CAMPAIGN_HOST_CLOCK"] = str(world.clock)
    try:
        yield
    finally:
        del os.environ["CAMPAIGN_HOST_CLOCK"]


def _bring_forward(world: World) -> None:
    """What was put off by a second while the clock was an hour ahead would wait for that hour; rows that are
    held wait for others."""
    soon = datetime.now(UTC) + timedelta(seconds=60)
    world.sql(
        "UPDATE jobs SET scheduled_at = NULL "
        "WHERE state = 'queued' AND scheduled_at > :soon AND held IS NULL",
        {"soon": soon.replace(tzinfo=None).isoformat(" ") if world.database == "sqlite" else soon},
    )


def _end_beside_a_hang(faults: Faults, fleet: Fleet, action: Action) -> None:
    """Everybody is asked to end while something hangs that goes on only when all are gone."""
    faults.carry_out(action)
    fleet.stop(action.name)
    faults.continue_servers()
    fleet.look_for_what_is_left()


def _judge_time(ledger: Ledger, fleet: Fleet, watchdog: Watchdog, report: Report) -> None:
    """Of every call and of every process that was asked to end."""
    lateness = watchdog.lateness
    timing = Timing(ledger.calls, fleet.endings, fleet.stops, lateness, time.monotonic())
    for violation in judge_time(timing):
        report.add(violation)
    report.count("calls timed", len(ledger.calls))
    report.count("ends timed", len(fleet.endings))
    report.count("ends timed beside a hang", sum(bool(ending.hung) for ending in fleet.endings))
    report.count("seconds that the machine was late", round(sum(late.seconds for late in lateness)))
    for call in ledger.calls:
        kind = "http" if call.keeper != "campaign" else "client"
        if call.ended is not None:
            report.highest(f"longest call, {kind}, s", round(call.ended - call.began))


def settle(world: World, report: Report, lateness: Sequence[Late]) -> bool:
    """Wait until every job has ended; False where nothing goes on in time."""
    left, moved_at = -1, time.monotonic()
    query = "SELECT count(*) FROM jobs WHERE state IN ('queued', 'running')"
    while number := world.sql(query)[0][0]:
        if number != left:
            left, moved_at = number, time.monotonic()
        elif (now := time.monotonic()) - moved_at > (most := STUCK_SECONDS + lost(lateness, moved_at, now)):
            states = world.sql("SELECT state, count(*) FROM jobs GROUP BY state")
            said = f"no job has ended for {most:.0f} s of peace: {dict(map(tuple, states))}"
            report.violate("unfinished", said)
            return False
        report.progress(f"settling, {number} jobs left")
        time.sleep(0.25)
    return True


def _look_for_messages(world: World, report: Report) -> None:
    """With nothing to do and live workers, every message is taken away in time."""
    give_up_at = time.monotonic() + QUIET_SECONDS
    while True:
        try:
            with world.redis.client() as client:
                names = [name for name in client.keys("nightmill*") if client.type(name) == b"list"]
                waiting = {name.decode(): client.llen(name) for name in names}
                unacknowledged = client.hlen("unacked")
        except redis.exceptions.RedisError as error:
            waiting, unacknowledged = {str(error): 1}, 0
        if not waiting or time.monotonic() > give_up_at:
            break
        time.sleep(0.25)
    report.count("messages that dead workers held", unacknowledged)
    if waiting:
        report.violate("messages", f"left in Redis after {QUIET_SECONDS:.0f} s without work: {waiting}")


def _judge(world: World, ledger: Ledger, report: Report, *, settled: bool) -> None:
    changes = list(history.read(world.engine))
    present = frozenset(history.rows(world.engine))
    report.count("changes of rows", len(changes))
    last = {change.id: change for change in changes}
    for state, number in Counter(
        change.state if change.op != "D" else "deleted" for change in last.values()
    ).items():
        report.count(f"jobs {state}", number)
    trusted = CLOCK_TRUST_SECONDS if world.database == "postgresql" else 0.0
    wrong = [(since, (until or time.time()) + trusted) for since, until in world.wrong_clocks]
    deletions = history.deletions(world.engine)
    sleepers = history.sleepers(world.engine)
    report.count("workers that fell asleep", len(sleepers))
    for name, number in world.sql(
        "SELECT model, count(*) FROM loads WHERE ready_at IS NOT NULL GROUP BY model"
    ):
        report.count(f"loads of {name}", number)
    evidence = Evidence(
        ledger.promises, ledger.intents, changes, present, settled, wrong, deletions, sleepers
    )
    for violation in judge(evidence):
        report.add(violation)
    query = (
        "SELECT count(*) FROM partials JOIN jobs ON jobs.id = partials.job_id "
        "WHERE jobs.state IN ('succeeded', 'failed', 'cancelled') AND NOT (jobs.state = 'succeeded' AND "
        "(jobs.stop_reason = 'length' OR EXISTS (SELECT 1 FROM answers "
        "WHERE answers.job_id = jobs.id AND answers.stop_reason = 'length')))"
    )
    if left := world.sql(query)[0][0]:
        report.violate("partials", f"{left} jobs that have ended, and were not cut, still have saved tokens")


def _count_restarts(report: Report) -> None:
    """Workers end by our faults, and for each poison until it is alone and spent; no other way."""

    def count(what: str) -> int:
        return report.counts[f"{report.part}: {what}"]

    ours = sum(count(f"fault {name}") for name in ("kill_worker", "kill_engine", "terminate", "hang_engine"))
    beside = WORKERS * sum(count(f"fault {name}") for name in OF_SERVERS)  # who waits too long may end, too
    poisons = count("fault poison") + count("poisons of chains")
    most = ours + beside + RESTARTS_A_POISON * poisons + WORKERS
    if count("worker ends") > most:
        report.violate("restarts", f"workers ended {count('worker ends')} times, {most} are explained")


def _read_logs(fleet: Fleet, report: Report) -> None:
    """What workers died of, for the table."""
    for log in filter(Path.exists, fleet.logs):
        content = log.read_text(errors="replace")
        report.count("tracebacks in logs", content.count("Traceback (most recent call last)"))
        report.count("workers that ended for a reason", content.count("this worker ends"))
