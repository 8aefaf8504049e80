"""A real table with the bundled model: labelled by `nightmill run`, and tried before."""

import csv
import itertools
import json
import sqlite3
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
TEMPLATE = "Write a haiku about {{ weather }}"
ASKED = ["--template", TEMPLATE, "--choice", "good", "--choice", "bad", "--max-tokens", "4"]
ROWS = 1461


@pytest.fixture
def quick(quick: Settings) -> Settings:
    """With the reference runner on the demo model."""
    return quick.model_copy(update={"reference": True, "model": demo_model()})


@on_sqlite
@pytest.mark.parametrize("labelled_rows", [150, pytest.param(ROWS, marks=pytest.mark.slow)])
def test_a_real_table_is_tried_planned_and_labelled(
    quick: Settings, labelled_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in worker_env(quick).items():
        monkeypatch.setenv(name, value)
    with Client(quick) as client, running_worker(client, tmp_path / "worker.log"):
        tried = [
            CliRunner().invoke(
                main, ["try", str(WEATHER), "--rows", "5", "--seed-of-sample", "3", "--json", *ASKED]
            )
            for _ in range(2)
        ]
        first, again = (json.loads(result.output) for result in tried)
        rows = [row["row"] for row in first["rows"]]
        assert len(set(rows)) == 5
        assert rows == sorted(rows) == [row["row"] for row in again["rows"]]
        assert {row["text"] for row in first["rows"]} <= {"good", "bad"}
        assert (first["good"], first["bad"]) == (ROWS, 0)
        assert client.list_batches() == []  # nothing is left of what was tried
        shown = CliRunner().invoke(
            main, ["try", str(WEATHER), "--rows", "2", *ASKED[:2], "--max-tokens", "1"]
        )
        assert "Write a haiku about" in shown.output
        assert "warning: 2 of 2 answers were cut" in shown.output
        assert "the whole file: 1,461 rows that can be run" in shown.output
        assert CliRunner().invoke(main, ["plan", str(WEATHER), "--no-measure", *ASKED]).exit_code == 0
        theirs = tmp_path / "theirs.db"
        with sqlite3.connect(theirs) as database:
            database.execute("CREATE TABLE days (weather)")
            database.executemany("INSERT INTO days VALUES (?)", [("rain",), ("sun",), ("fog",)])
        query = ["--query", "SELECT weather FROM days", "--from", f"sqlite:///{theirs}", "--json"]
        tried_query = CliRunner().invoke(main, ["try", *query, "--rows", "2", *ASKED])
        assert (json.loads(tried_query.output)["good"], len(json.loads(tried_query.output)["rows"])) == (3, 2)
        planned = CliRunner().invoke(main, ["plan", *query, "--no-measure", *ASKED])
        assert json.loads(planned.stdout)["good"] == 3
        out, part = tmp_path / "out.csv", tmp_path / "part.csv"
        with WEATHER.open() as file:
            part.write_text("".join(itertools.islice(file, labelled_rows + 1)))
        done = CliRunner().invoke(main, ["run", str(part), "-o", str(out), "--column", "kind", *ASKED])
        assert done.exit_code == 0, done.output
    with part.open(newline="") as file:
        source = list(csv.DictReader(file))
    with out.open(newline="") as file:
        labelled = list(csv.DictReader(file))
    assert [{name: row[name] for name in source[0]} for row in labelled] == source
    assert {row["kind"] for row in labelled} <= {"good", "bad"}
    assert len(labelled) == labelled_rows
