"""Cut rows of a real table, continued by a real worker, and reused: those of one go, and verified."""

import itertools
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from tests.integration.worker.conftest import on_sqlite
from tests.support.servers import worker_env

pytestmark = pytest.mark.heavy
WEATHER = Path(__file__).parents[2] / "support" / "seattle-weather.csv"
TEMPLATE = "Write a haiku about {{ weather }} and {{ date }}"
ROWS = 16


@pytest.fixture
def quick(quick: Settings) -> Settings:
    """With the reference runner on the demo model."""
    return quick.model_copy(update={"reference": True, "model": demo_model()})


@on_sqlite
def test_extended_and_reused_rows_equal_those_of_one_go_and_verify(
    quick: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in worker_env(quick).items():
        monkeypatch.setenv(name, value)
    part = tmp_path / "weather.csv"
    with WEATHER.open() as file:
        part.write_text("".join(itertools.islice(file, ROWS + 1)))

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        return done.output

    def submit(name: str, max_tokens: int, *more: str) -> None:
        asked = ("--template", TEMPLATE, "--seed", "7", "--max-tokens", str(max_tokens))
        run("batch", "submit", str(part), "--name", name, *asked, *more)
        run("batch", "watch", name)

    with Client(quick) as client, running_worker(client, tmp_path / "worker.log"):
        submit("steps", 8)
        cut = client.get_batch("steps").status().stop_reasons["length"]
        assert cut > ROWS // 2
        said = json.loads(run("batch", "extend", "steps", "--max-tokens", "24", "--json"))
        assert said == {"queued": cut, "refused": 0, "reason": None}
        run("batch", "watch", "steps")
        submit("once", 24)
        assert json.loads(run("batch", "diff", "steps", "once", "--json"))["differing"] == 0
        verified = json.loads(run("verify", "steps", "--sample", "10", "--json"))
        assert [row["verdict"] for row in verified["rows"]] == ["equal"] * 10
        extended = next(job for job in client.get_batch("steps").results() if job.history)
        shown = run("show", extended.id)
        assert "before extend        max_tokens 8, ended succeeded (length) at " in shown
        assert "after 8 tokens, the text begins with its text" in shown
        less = run("batch", "extend", "steps", "--max-tokens", "2")
        assert less == "steps: 0 rows queued again: none was cut at a lower limit\n"
        assert (
            run("batch", "retry", "steps", "--where", "state=failed,code=error")
            == "steps: 0 rows queued again: no such row has ended without an answer\n"
        )
        refused = CliRunner().invoke(main, ["batch", "retry", "steps", "--where", "failed"])
        assert (refused.exit_code, "'failed' is not NAME=VALUE" in refused.output) == (2, True)
        _reused_rows_verify(client, run, submit)
        _a_query_runs_into_a_table(run, tmp_path / "theirs.db")


def _a_query_runs_into_a_table(run: Callable[..., str], path: Path) -> None:
    """In one command, and again: then nothing is computed, and nothing is there twice."""
    with closing(sqlite3.connect(path)) as theirs:
        theirs.execute("CREATE TABLE days (id INTEGER, weather TEXT)")
        theirs.executemany("INSERT INTO days VALUES (?, ?)", [(number, "rain") for number in range(5)])
        theirs.commit()
        url = f"sqlite:///{path}"
        query = ("--query", "SELECT id, weather FROM days ORDER BY id", "--from", url)
        asked = (*query, "--template", "{{ weather }} {{ id }}", "--max-tokens", "4", "--column", "label")
        for _ in range(2):
            assert f"Results: {url}#labels; errors: " in run(*("run", *asked, "--into", f"{url}#labels"))
            found = theirs.execute("SELECT id, completion_tokens > 0 FROM labels ORDER BY id").fetchall()
            assert found == [(number, 1) for number in range(5)]


def _reused_rows_verify(client: Client, run: Callable[..., str], submit: Callable[..., None]) -> None:
    for name in ("first", "second"):
        submit(name, 24, "--reuse", "exact")
    first, second = (
        {job.row: job for job in client.get_batch(name).results()} for name in ("first", "second")
    )
    assert {job.reused_from for job in first.values()} == {None}
    assert all(job.reused_from == first[row].id for row, job in second.items())
    assert json.loads(run("batch", "diff", "second", "once", "--json"))["differing"] == 0
    # The copies are computed: they take no answer of the rows that they are to prove.
    verified = json.loads(run("verify", "second", "--sample", "10", "--keep", "--json"))
    assert [row["verdict"] for row in verified["rows"]] == ["equal"] * 10
    copies = list(client.get_batch(verified["copies"]).results())
    assert len(copies) == 10
    assert {(job.reuse, job.reused_from) for job in copies} == {(None, None)}
    run("batch", "delete", "first", "--yes")
    shown = run("show", second[1].id)
    assert f"reused_from          {first[1].id}" in shown
    assert "reused_from_gone     true" in shown
