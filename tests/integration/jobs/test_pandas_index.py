"""Tables that pandas wrote with its index: the index is ignored, and that is said."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchFileError, IgnoredColumnWarning, InvalidRequestError
from tests.support.servers import worker_env

PROMPTS = ["one", "two", "three"]
CSV = {
    "index.csv": ",prompt,max_tokens\n5,one,3\n6,two,3\n7,three,3\n",
    "semicolons.csv": ";prompt;max_tokens\n5;one;3\n6;two;3\n7;three;3\n",
    "two.csv": ",,prompt\na,1,one\na,2,two\nb,1,three\n",
    "again.csv": ",Unnamed: 0,prompt\n0,5,one\n1,6,two\n2,7,three\n",
    "unnamed.csv": "Unnamed: 0,prompt\n5,one\n6,two\n7,three\n",
}


def table(*levels: str) -> Any:
    arrow = pytest.importorskip("pyarrow")
    return arrow.table({"prompt": PROMPTS} | {level: [5, 6, 7] for level in levels})


def prompts_of(client: Client) -> list[Any]:
    return [job.prompt for job in client.batches.store.in_order("a", ["queued"])]  # type: ignore[list-item]


@pytest.mark.parametrize("name", CSV)
def test_a_first_column_without_a_name_is_ignored(sqlite_client: Client, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(CSV[name])
    with pytest.warns(
        IgnoredColumnWarning, match=f"{name}: columns? .* ignored: the index of a pandas frame"
    ):
        sqlite_client.submit_batch(path, name="a")
    assert prompts_of(sqlite_client) == PROMPTS


@pytest.mark.parametrize("levels", [("__index_level_0__",), ("__index_level_0__", "__index_level_1__")])
def test_levels_of_an_index_are_ignored(
    sqlite_client: Client, tmp_path: Path, levels: tuple[str, ...]
) -> None:
    path = tmp_path / "in.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(table(*levels), path)
    for source in (path, table(*levels)):
        with pytest.warns(IgnoredColumnWarning, match="__index_level_0__"):
            batch = sqlite_client.submit_batch(source, name="a")
        assert prompts_of(sqlite_client) == PROMPTS
        batch.cancel()
        batch.delete()


def test_columns_that_are_no_index_are_refused_as_before(sqlite_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    for columns in ("id,prompt\n1,one\n", "prompt,Unnamed: 0\none,1\n", ",text\n1,one\n"):
        path.write_text(columns)
        with warnings.catch_warnings(), pytest.raises(BatchFileError, match=r"not supported|has no column"):
            warnings.simplefilter("error")
            sqlite_client.submit_batch(path, name="a")
    with pytest.raises(InvalidRequestError, match="column 'index_level' is not supported"):
        sqlite_client.submit_batch(table("index_level"), name="a")


def test_the_command_says_what_it_ignores(sqlite_settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text(CSV["index.csv"])
    done = CliRunner().invoke(
        main, ["batch", "submit", str(path), "--name", "a"], env=worker_env(sqlite_settings)
    )
    assert done.exit_code == 0, done.output
    assert "in.csv: column '' is ignored: the index of a pandas frame" in done.stderr
