"""Who is charged for a death: the guilty alone, whoever else was in flight or killed the worker."""

import math
import random
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from sqlalchemy import delete, text

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claim, Claims, Outcome
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import Clock

STALE = timedelta(seconds=30)


class DiedError(Exception):
    """The worker is gone."""


class Mill:
    """One worker after the other, each with so much room, until the queue is empty.

    `kills` says whether somebody kills the worker from outside while these jobs are in flight.
    """

    def __init__(
        self,
        client: Client,
        clock: Clock,
        ids: Sequence[str],
        guilty: set[str],
        capacity: int,
        kills: Callable[[], bool] = lambda: False,
    ) -> None:
        self.client, self.clock, self.ids, self.guilty = client, clock, ids, guilty
        self.capacity, self.kills = capacity, kills
        self.sweep = Sweep(client.database)
        self.deaths = self.killed = 0

    def run(self) -> None:
        while True:
            worker = Claims(self.client.database, uuid.uuid4().hex)
            worker.register("host", 1, "model", None)
            try:
                self.live(worker)
                return
            except DiedError:
                self.deaths += 1
                assert self.deaths < 500

    def live(self, worker: Claims) -> None:
        """Suspects first, group by group; then the others."""
        while claims := worker.claim_suspects((None, "model"), self.capacity):
            self.generate(worker, claims)
        for start in range(0, len(self.ids), self.capacity):
            if claims := worker.claim(self.ids[start : start + self.capacity]):
                self.generate(worker, claims)

    def generate(self, worker: Claims, claims: list[Claim]) -> None:
        killed = self.kills()
        self.killed += killed
        if killed or not self.guilty.isdisjoint(claim.job_id for claim in claims):
            self.die(worker, claims)
            raise DiedError
        worker.finish(
            [Outcome(one.job_id, one.attempt, StopReason.EOS, f"of {one.job_id}", 1, 1) for one in claims]
        )

    def die(self, worker: Claims, claims: list[Claim]) -> None:
        """In turns: the engine fails, the process ends under a supervisor's eyes, it falls silent."""
        match self.deaths % 3:
            case 0:
                worker.give_up([(claim.job_id, claim.attempt) for claim in claims], "the engine failed")
            case 1:
                self.sweep.bury(worker.worker_id, blame=True)
            case _:
                self.clock.advance(60)
                self.sweep.rescue(STALE)

    def failed(self) -> set[str]:
        """The jobs that failed; all others have succeeded with their own texts."""
        jobs = list(self.client.results(self.ids, wait=False))
        assert len(jobs) == len(self.ids)
        for job in jobs:
            if job.state is not JobState.FAILED:
                assert (job.state, job.text) == (JobState.SUCCEEDED, f"of {job.id}")
                assert self.killed or (job.failures, job.errors) == (0, [])
        return {job.id for job in jobs if job.state is JobState.FAILED}


@pytest.mark.parametrize(
    ("server_settings", "count", "deaths"),
    [("sqlite", 4096, 42), ("postgresql", 256, 30)],
    indirect=["server_settings"],
)
def test_of_many_jobs_only_the_3_that_kill_their_worker_fail(
    server_settings: Settings, clock: Clock, count: int, deaths: int
) -> None:
    """The worst case, in which they part at once.

    Of 4,096 jobs: 1 + 2 + 10 x 3 deaths until each of them is alone, and 3 attempts of each.
    """
    with Client(server_settings, clock=clock) as client:
        ids = client.enqueue_many(["prompt"] * count)
        guilty = {ids[0], ids[count // 2], ids[count * 3 // 4]}
        mill = Mill(client, clock, ids, guilty, count)
        mill.run()
        assert mill.failed() == guilty
        assert mill.deaths == deaths <= 3 * (math.log2(count) + 2)
        for job in map(client.get, guilty):
            assert (job.failures, len(job.errors)) == (3, 3)
            assert job.error is not None and job.error.startswith("all 3 attempts failed; the last: ")


@given(
    count=st.integers(1, 70),
    capacity=st.sampled_from([1, 2, 5, 32, 64, 200]),
    places=st.sets(st.integers(0, 69), max_size=3),
    max_attempts=st.integers(1, 3),
)
@example(count=64, capacity=200, places={0, 32, 48}, max_attempts=3)
@example(count=130, capacity=32, places={31, 32, 129}, max_attempts=1)
@hypothesis_settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_exactly_the_guilty_fail_within_the_bound(
    sqlite_client: Client, clock: Clock, count: int, capacity: int, places: set[int], max_attempts: int
) -> None:
    with sqlite_client.database.write() as connection:
        connection.execute(delete(JobRow))
    ids = list(sqlite_client.enqueue_many(["prompt"] * count, max_attempts=max_attempts))
    guilty = {ids[place] for place in places if place < count}
    mill = Mill(sqlite_client, clock, ids, guilty, capacity)
    mill.run()
    assert mill.failed() == guilty
    halvings = math.ceil(math.log2(min(count, capacity)))
    assert mill.deaths <= len(guilty) * (halvings + max_attempts)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kills_from_outside_fail_nobody(sqlite_client: Client, clock: Clock, seed: int) -> None:
    draw = random.Random(seed)
    ids = list(sqlite_client.enqueue_many(["prompt"] * 600))
    guilty = set(draw.sample(ids, seed - 1))
    mill = Mill(sqlite_client, clock, ids, guilty, 256, lambda: mill.killed < 20 and draw.random() < 0.6)
    mill.run()
    assert mill.failed() == guilty
    assert mill.killed >= 12


def test_suspects_are_not_announced_and_not_claimed_from_messages(client: Client, clock: Clock) -> None:
    ids, worker = die_with(client, 5)
    sweep = Sweep(client.database)
    clock.advance(3600)
    assert sweep.unsent(100) == [] == sweep.unanswered(None, timedelta(seconds=60), 100)
    assert worker.claim(ids) == []
    assert [[one.job_id for one in worker.claim_suspects((None,), 10)] for _ in range(3)] == [
        ids[:3],
        ids[3:],
        [],
    ]


def test_what_there_is_no_room_for_stays_in_its_group(client: Client) -> None:
    ids, worker = die_with(client, 8)
    assert [one.job_id for one in worker.claim_suspects((None,), 3)] == ids[:3]
    assert worker.hand_back([(ids[1], 2)]) == [ids[1]]  # drained: a suspect still
    assert [one.job_id for one in worker.claim_suspects((None,), 9)] == [ids[1], ids[3]]


def test_suspects_may_be_cancelled_and_expire_and_a_retry_is_no_suspect(client: Client, clock: Clock) -> None:
    ids, worker = die_with(client, 3, deadline=timedelta(hours=1))
    assert client.cancel(ids[0]) is JobState.CANCELLED
    clock.advance(7200)
    assert worker.claim_suspects((None,), 10) == [] and not worker.suspects_wait((None,))
    assert Sweep(client.database).expire() == 2
    for job_id in ids:
        client.retry(job_id)
    assert [one.job_id for one in worker.claim(ids)] == ids


def test_groups_are_for_workers_of_their_model_and_urgent_ones_go_first(client: Client) -> None:
    plain, worker = die_with(client, 2)
    named, _ = die_with(client, 2, model="model")
    urgent, _ = die_with(client, 2, priority=9)
    assert not worker.suspects_wait(("other",))
    assert worker.claim_suspects(("other",), 10) == []
    order = [[one.job_id for one in worker.claim_suspects((None, "model"), 10)] for _ in range(7)]
    assert order == [*([job] for job in [*urgent, *plain, *named]), []]


def test_a_job_that_died_alone_stays_alone(client: Client) -> None:
    (job_id,), worker = die_with(client, 1)
    others, _ = die_with(client, 4)
    groups = [[one.job_id for one in worker.claim_suspects((None,), 10)] for _ in range(3)]
    assert groups == [[job_id], others[:2], others[2:]]
    assert client.get(job_id).failures == 1


def test_looking_for_suspects_reads_an_index_of_them_alone(client: Client) -> None:
    with client.database.read() as connection:
        plan = "EXPLAIN QUERY PLAN" if client.database.is_sqlite else "EXPLAIN"
        if not client.database.is_sqlite:
            connection.execute(text("SET LOCAL enable_seqscan = off"))  # an empty table is read as a whole
        rows = connection.execute(
            text(
                f"{plan} SELECT suspects FROM jobs WHERE state = 'queued' AND suspects IS NOT NULL "
                "AND model IS NULL GROUP BY suspects ORDER BY max(priority) DESC, suspects LIMIT 1"
            )
        )
        assert "ix_jobs_suspects" in str(rows.all())


def test_suspects_that_are_raced_for_run_once(server_settings: Settings, clock: Clock) -> None:
    with Client(server_settings, clock=clock) as client:
        ids, _ = die_with(client, 100)
        barrier = Barrier(4)

        def race(number: int) -> list[str]:
            claims, won = Claims(client.database, f"{number:032x}"), []
            barrier.wait(120)
            while claims.suspects_wait((None,)):
                won += [claim.job_id for claim in claims.claim_suspects((None,), 7)]
            return won

        with ThreadPoolExecutor(4) as pool:
            won = [job for one in pool.map(race, range(4)) for job in one]
        assert sorted(won) == ids


def test_one_of_the_workers_that_serve_a_group_interrupts_its_work_for_it(
    client: Client, clock: Clock
) -> None:
    a, b, c = (Claims(client.database, letter * 32) for letter in "abc")
    for worker, model in ((a, "model"), (b, "model"), (c, "other")):
        worker.register("host", 1, model, None)
        worker.beat(WorkerState.READY)

    def elected(*asked: str) -> str:
        """Those of these workers that are to interrupt their work."""
        workers = {"a": (a, "model"), "b": (b, "model"), "c": (c, "other")}
        return "".join(name for name in asked if workers[name][0].is_to_drain((None, workers[name][1])))

    assert elected("a", "b", "c") == ""  # no group waits
    die_with(client, 2, model="model")
    assert elected("a", "b", "c") == "a"
    a.beat(WorkerState.DRAINING)  # it is about to stop
    assert elected("b", "c") == "b"
    a.beat(WorkerState.READY)
    die_with(client, 2, model="other")  # which neither a nor b serves
    assert elected("a", "b", "c") == "ac"


def die_with(client: Client, count: int, **options: object) -> tuple[list[str], Claims]:
    """Jobs that were in flight when their worker died, and another worker."""
    ids = list(client.enqueue_many(["prompt"] * count, **options))  # type: ignore[arg-type]
    dead = Claims(client.database, "d" * 32)
    claims = dead.claim(ids)
    dead.give_up([(one.job_id, one.attempt) for one in claims], "the engine failed")
    return ids, Claims(client.database, "a" * 32)
