"""Whatever is enqueued, reused, extended, retried, cancelled and deleted: every text is that of its row.

Hypothesis plays clients and two workers on one database. A text must be what its row's prompt, parameters and
seed give, whoever it was computed for, and the row must tell the truth about that.
"""

import contextlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import delete, func, select

from nightmill.jobs.base.contract import FINAL_STATES, JobState, StopReason
from nightmill.jobs.errors import InvalidTransitionError
from nightmill.jobs.reply.history import begins_with
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request import spec
from nightmill.jobs.sql import requeueing
from nightmill.jobs.sql.claims import Claim
from nightmill.jobs.sql.deletion import delete_job
from nightmill.jobs.sql.tables import BatchRow, JobRow, PartialRow
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ScriptedRunner, make_request
from tests.unit.worker.bench import Bench

MOST = 40
numbers = st.integers(0, MOST - 1)
contents = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["1", "2"]),
        "seed": st.sampled_from([3, 4, None]),
        "max_tokens": st.sampled_from([4, 8]),
        "reuse": st.sampled_from(["exact", "exact", "any", None]),
        "n": st.sampled_from([1, 1, 2]),
    }
)


def encoded(claim: Claim) -> tuple[int, ...]:
    return (1, 2, int(claim.prompt or 0))


def text_of(job: Job, seed: int) -> tuple[str, StopReason]:
    """What the row says that its text is."""
    params = {"max_tokens": job.params.max_tokens, "temperature": job.params.temperature}
    request = make_request("j", (1, 2, int(job.prompt or 0)), seed=seed, **params)
    return expected(request, 200)[1:]  # type: ignore[return-value]


class Histories(RuleBasedStateMachine):
    """What may happen, and what must hold after it."""

    def __init__(self, benches: list[Bench]) -> None:
        super().__init__()
        self.benches = benches
        self.client = benches[0].client
        self.asked: dict[str, int | None] = {}  # the seeds of the users
        self.deleted: set[str] = set()
        seeds = random.Random(1)  # the same for each history, which is then the same again
        for module in (spec, requeueing):
            module.secrets = SimpleNamespace(randbits=seeds.getrandbits)  # type: ignore[attr-defined]
        with self.client.database.write() as connection:
            for table in (PartialRow, JobRow, BatchRow):
                connection.execute(delete(table))
        self.client.enqueue("1", batch="b", max_tokens=4)

    @rule(rows=st.lists(contents, min_size=1, max_size=6))
    def enqueue(self, rows: list[dict[str, Any]]) -> None:
        if len(self.asked) < MOST:
            ids = self.client.enqueue_many(rows, batch="b")
            self.asked |= {job_id: row["seed"] for job_id, row in zip(ids, rows, strict=True)}

    @rule(worker=st.integers(0, 1))
    def run(self, worker: int) -> None:
        self.benches[worker].service.run_shard(self._queued())

    @rule()
    def run_on_both(self) -> None:
        ids = self._queued()
        threads = [bench.run(ids[number::2]) for number, bench in enumerate(self.benches)]
        for thread in threads:
            thread.join(120)

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        if job := self._job(number):
            with contextlib.suppress(InvalidTransitionError):
                self.client.cancel(job.id)

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        if (job := self._job(number)) and delete_job(self.client.database, job.id):
            self.deleted.add(job.id)

    @rule(further=st.sampled_from([8, 12, 30]))
    def extend(self, further: int) -> None:
        self.client.get_batch("b").extend(further)

    @rule(temperature=st.sampled_from([0.5, None]), new_seeds=st.booleans())
    def retry(self, temperature: float | None, new_seeds: bool) -> None:
        changed = [job.id for job in self._jobs() if job.state in (JobState.FAILED, JobState.CANCELLED)]
        queued = self.client.get_batch("b").retry(temperature=temperature, new_seeds=new_seeds)
        assert queued.rows == len(changed)
        if new_seeds:
            self.asked |= dict.fromkeys(changed, None)

    @invariant()
    def every_text_is_that_of_its_row(self) -> None:
        jobs = self._jobs()
        there = {job.id: job for job in jobs}
        for job in jobs:
            if job.state is not JobState.SUCCEEDED:
                continue
            for answer in job.answers:
                assert (answer.text, answer.stop_reason) == text_of(job, answer.seed)
            assert job.answers[0].seed == job.seed
            if job.reuse != "any" and self.asked.get(job.id) is not None:
                assert job.seed == self.asked[job.id]
            if job.reused_from is not None:
                self._tells_the_truth(job, there)
            for entry in reversed(job.history):
                if entry["change"] != "extend":
                    break  # what was before belongs to other parameters
                if job.params.n == 1 and "�" not in str(job.text):
                    assert begins_with(job.text, entry) is not False

    def _tells_the_truth(self, job: Job, there: dict[str, Job]) -> None:
        origin = there.get(str(job.reused_from))
        assert job.reuse is not None
        assert job.reused_from_gone is (origin is None) is (job.reused_from in self.deleted)
        if origin is not None and origin.state is JobState.SUCCEEDED and not origin.history:
            assert origin.reused_from is None
            assert (origin.text, origin.prompt, origin.params) == (job.text, job.prompt, job.params)

    @invariant()
    def nobody_waits_for_what_is_over(self) -> None:
        for bench in self.benches:
            assert bench.fatal == []
            assert bench.service._reusing._leaders == bench.service._reusing._identities == {}
        with self.client.database.read() as connection:
            kept = select(PartialRow.job_id).join(JobRow, JobRow.id == PartialRow.job_id)
            lost = kept.where(JobRow.state.in_(sorted(FINAL_STATES)), JobRow.state != JobState.SUCCEEDED)
            assert connection.execute(select(func.count()).select_from(lost.subquery())).scalar_one() == 0

    def _jobs(self) -> list[Job]:
        return self.client.list_jobs(batch="b", limit=1000)[::-1]

    def _job(self, number: int) -> Job | None:
        jobs = self._jobs()
        return jobs[number % len(jobs)] if jobs else None

    def _queued(self) -> list[str]:
        return [job.id for job in self._jobs() if job.state is JobState.QUEUED]


@pytest.fixture(autouse=True)
def _own_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What histories put in the place of random seeds is gone after the test."""
    for module in (spec, requeueing):
        monkeypatch.setattr(module, "secrets", module.secrets)


def search(build: Callable[..., Bench], examples: int, steps: int) -> None:
    benches = [build(ScriptedRunner(slots=16, kv_pages=256), capacity=64, name=name) for name in "ab"]
    for bench in benches:
        bench.prompting.encode = encoded  # type: ignore[method-assign, assignment]
    run_state_machine_as_test(
        lambda: Histories(benches),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )


def test_every_text_is_that_of_its_row_whoever_it_was_computed_for(build: Callable[..., Bench]) -> None:
    search(build, examples=8, steps=25)


@pytest.mark.slow  # the same, longer
def test_longer_histories(build: Callable[..., Bench]) -> None:
    search(build, examples=25, steps=40)
