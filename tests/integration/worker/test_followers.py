"""A chain of three with a real worker: each row begins once the one before it has ended, without a sweep."""

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from tests.integration.worker.conftest import StartWorker, on_sqlite

pytestmark = pytest.mark.heavy
ROWS = 8


@on_sqlite
def test_a_chain_is_announced_by_who_ends_it_and_can_be_verified(
    quick: Settings, start_worker: StartWorker
) -> None:
    # Sweeps are minutes apart: what nobody announces would wait for one.
    rare = {"heartbeat_seconds": 300.0, "stale_seconds": 900.0, "resend_seconds": 900.0}
    with Client(quick.model_copy(update=rare)) as client, start_worker("a", **rare):
        _chain(client)


def _chain(jobs_client: Client) -> None:
    words = ("rain", "sea", "moss", "snow", "wind", "leaf", "owl", "x " * 700)
    rows = [{"word": word} for word in words]
    drafts = jobs_client.submit_batch(
        rows, name="drafts", template="Write a haiku about {{ word }}", column="haiku", max_tokens=12, seed=1
    )
    shout = jobs_client.submit_batch(
        after="drafts", name="shout", template="{{ prior.text }}" * 3, max_tokens=12, seed=2
    )
    last = jobs_client.submit_batch(
        after="shout", name="last", template="{{ prior.messages }}Of {{ haiku }}?", max_tokens=4, seed=3
    )
    status = last.wait(timeout=60)
    assert status.states == {JobState.SUCCEEDED: ROWS - 1, JobState.FAILED: 1}
    # The prompt that is too long is refused as usual, and what follows it ends.
    assert [job.row for job in drafts.errors()] == [ROWS]
    assert [job.errors[-1]["code"] for job in last.errors()] == ["prior_failed"]
    texts = {job.row: job for job in drafts.results()}
    for job in shout.results():
        assert job.messages == [{"role": "user", "content": str(texts[job.row].text) * 3}]
    for job in last.results():
        assert job.messages is not None and len(job.messages) == 3
        assert job.metadata["haiku"] == texts[job.row].content
    assert jobs_client.verify("last", sample=3, timeout=60).equal
