"""A chain of three with a real worker: each row begins once the one before it has ended, without a sweep."""

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from tests.integration.worker.conftest import StartWorker, on_sqlite
from tests.support.servers import worker_env

pytestmark = pytest.mark.heavy
WORDS = ("rain", "sea", "moss", "snow", "wind", "leaf", "owl", "x " * 700)
ROWS = len(WORDS)


@on_sqlite
def test_a_chain_is_announced_by_who_ends_it_and_can_be_verified(
    quick: Settings, start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sweeps are minutes apart: what nobody announces would wait for one.
    rare = {"heartbeat_seconds": 300.0, "stale_seconds": 900.0, "resend_seconds": 900.0}
    with Client(quick.model_copy(update=rare)) as client, start_worker("a", **rare):
        _chain(client)
        for name, value in worker_env(client.settings).items():
            monkeypatch.setenv(name, value)
        out = tmp_path / "out.csv"
        asked = ["--template", "{{ prior.text }}", "--max-tokens", "2", "--seed", "1"]
        done = CliRunner().invoke(main, ["run", "--after", "drafts", "-o", str(out), *asked])
        assert done.exit_code == 3, done.output  # of the row whose prior failed
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["word"] for row in rows] == list(WORDS[:-1])
    assert all(row["haiku"] and row["answer"] for row in rows)
    assert "prior_failed" in (tmp_path / "out.errors.csv").read_text()


def _chain(jobs_client: Client) -> None:
    rows = [{"word": word} for word in WORDS]
    drafts = jobs_client.submit_batch(
        rows, name="drafts", template="Write a haiku about {{ word }}", column="haiku", max_tokens=12, seed=1
    )
    shout = jobs_client.submit_batch(
        after="drafts", name="shout", template="{{ prior.text }}" * 3, max_tokens=12, seed=2
    )
    last = jobs_client.submit_batch(
        after="shout", name="last", template="{{ prior.messages }}Of {{ haiku }}?", max_tokens=4, seed=3
    )
    status = last.wait(timeout=240)
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
    assert jobs_client.verify("last", sample=3, timeout=240).equal
