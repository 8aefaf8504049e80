"""Who calls beside a night of flex calls does not queue behind them: a matter of order, at any speed."""

from collections.abc import Callable
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql.jobs import Selection
from tests.support.servers import wait_until
from tests.unit.worker.bench import Bench, Pausing

CALLS = 20_000
SLOTS = 8


@pytest.mark.timeout(300)
def test_an_interactive_job_ends_before_the_flex_calls_that_were_there(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Pausing(slots=SLOTS)
    bench = build(runner, capacity=SLOTS, reserved_slots=1)
    client, ends = bench.client, list[str]()
    put = bench.service._writer.put

    def recorded(outcome: Any) -> None:
        ends.append(outcome.job_id)
        put(outcome)

    monkeypatch.setattr(bench.service._writer, "put", recorded)
    flex = list(client.enqueue_many(["prompt"] * CALLS, max_tokens=12, ignore_eos=True))
    assert {job.priority for job in client.list_jobs(limit=1)} == {5}
    runner.pause_at = 60
    bench.run(flex)
    wait_until(lambda: len(runner.batches) == runner.pause_at, 120)
    before = len(ends)
    assert 0 < before < CALLS // 2
    urgent = [client.enqueue("prompt", interactive=True, max_tokens=24, ignore_eos=True) for _ in range(3)]
    assert {client.get(job_id).priority for job_id in urgent} == {INTERACTIVE}
    assert len(bench.service.take(urgent[:1], interactive=True)) == 1  # there is a place for it at once
    runner.gate.set()
    for job_id in urgent[1:]:
        bench.service.take([job_id], interactive=True)
    wait_until(lambda: set(urgent) <= set(ends), 60)
    # While one of them draws its tokens, each of the other slots ends two flex calls, and begins a third.
    assert ends.index(urgent[0]) - before <= 3 * SLOTS
    assert max(map(ends.index, urgent)) - before <= 3 * len(urgent) * SLOTS
    assert client.store.count(Selection(states=[JobState.QUEUED])) > CALLS // 2
