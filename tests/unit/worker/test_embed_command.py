"""`nightmill embed` says what is wrong in the words of its own options."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nightmill.jobs.commands.main import main

MODEL = Path(__file__).parents[3] / "models" / "nightmill-demo.gguf"


def embed(folder: Path, *options: str) -> Result:
    """Run the command on a table of two columns."""
    table = folder / "papers.csv"
    table.write_text("title,the abstract\na,b\n")
    command = ["embed", str(table), "-o", str(folder / "out.jsonl"), "--model", str(MODEL), "--reference"]
    return CliRunner().invoke(main, [*command, *options])


def test_a_column_that_is_not_there_is_refused_by_the_option_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTMILL_DATA_DIR", str(tmp_path / "data"))
    said = "--column: there is no column 'abstract'; there are 'title', 'the abstract'"
    refused = embed(tmp_path, "--column", "abstract")
    assert (refused.exit_code, refused.output) == (1, f"Error: {said}\n")
    logged = embed(tmp_path, "--column", "abstract", "--log-format", "json")
    assert logged.exit_code == 1 and json.loads(logged.output)["message"] == said
    kept = embed(tmp_path, "--column", "title", "--keep", "abstract")
    assert kept.output.startswith("Error: keep: there is no column 'abstract'")
