"""Tables are batches: pandas, Polars and Arrow in as rows, results back as columns."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import InvalidParameterError, InvalidRequestError, MissingExtraError
from nightmill.jobs.sql.claims import Claims
from tests.integration.jobs.batches.rows import finish, jobs_of

pyarrow = pytest.importorskip("pyarrow")
ROWS = [
    {"custom_id": "a", "prompt": "one", "max_tokens": 3, "temperature": 0.5, "stop": ["x", "y"]},
    {"custom_id": "b", "prompt": "two", "max_tokens": None, "temperature": None, "stop": None},
]


class Polars:
    """As much of a Polars DataFrame as is used; it has a stream too, which needs pyarrow."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.columns = list(rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:  # its columns
        return iter(self.columns)

    def slice(self, offset: int, length: int) -> "Polars":
        made = Polars(self._rows)
        made._rows = self._rows[offset : offset + length]
        return made

    def to_dicts(self) -> list[dict[str, Any]]:
        return list(self._rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise ImportError("pyarrow")


class Pandas:
    """As much of a pandas DataFrame as is used: missing numbers make floating point of a column."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.columns = list(rows[0])
        self.index = SimpleNamespace(names=[None])
        self.iloc = self

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.columns)

    def __getitem__(self, some: slice) -> "Pandas":
        made = Pandas(self._rows)
        made._rows = self._rows[some]
        return made

    def astype(self, kind: type) -> "Pandas":
        assert kind is object
        return self

    def notna(self) -> list[dict[str, bool]]:
        return [{name: value is not None for name, value in row.items()} for row in self._rows]

    def where(self, mask: list[dict[str, bool]], other: None) -> "Pandas":
        kept = [
            {name: value if there[name] else other for name, value in row.items()}
            for row, there in zip(self._rows, mask, strict=True)
        ]
        made = Pandas(self._rows)
        made._rows = kept
        return made

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [
            row | {"max_tokens": None if row["max_tokens"] is None else float(row["max_tokens"])}
            for row in self._rows
        ]


class Stream:
    """Nothing but an Arrow stream, of whichever library."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._table = pyarrow.Table.from_pylist(rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


TABLES = {
    "polars": Polars,
    "pandas": Pandas,
    "stream": Stream,
    "table": pyarrow.Table.from_pylist,
    "record batch": pyarrow.RecordBatch.from_pylist,
    "reader": lambda rows: pyarrow.Table.from_pylist(rows).to_reader(max_chunksize=1),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_its_rows(sqlite_client: Client, kind: str) -> None:
    batch = sqlite_client.submit_batch(TABLES[kind](ROWS), name="night", max_tokens=9)
    ids = sqlite_client.enqueue_many(TABLES[kind](ROWS), max_tokens=9)
    for jobs in (jobs_of(batch).values(), map(sqlite_client.get, ids)):
        assert [
            (job.custom_id, job.prompt, job.params.max_tokens, job.params.temperature, job.params.stop)
            for job in jobs
        ] == [("a", "one", 3, 0.5, ("x", "y")), ("b", "two", 9, 1.0, ())]


def test_a_column_of_chats_and_one_of_metadata(sqlite_client: Client) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "hi", "name": None}], "metadata": {"k": 1}},
        {"messages": [{"role": "user", "content": "ho"}], "metadata": {"k": None}},
    ]
    expected = [[{"role": "user", "content": text}] for text in ("hi", "ho")]
    table = pyarrow.Table.from_pylist(chats)
    batch = sqlite_client.submit_batch(table, name="night")
    ids = sqlite_client.enqueue_many(table)
    assert [job.messages for job in jobs_of(batch).values()] == expected
    assert [sqlite_client.get(job_id).messages for job_id in ids] == expected
    assert sqlite_client.get(ids[0]).metadata == {"k": 1}


def test_a_long_table_is_read_in_parts(sqlite_client: Client) -> None:
    rows = [{"prompt": f"p{n}", "max_tokens": 3} for n in range(2500)]
    for kind in ("polars", "pandas", "table"):
        ids = sqlite_client.enqueue_many(TABLES[kind](rows))
        assert len(ids) == 2500 and sqlite_client.get(ids[-1]).prompt == "p2499"


def test_one_column_of_prompts_is_an_iterable(sqlite_client: Client) -> None:
    for column in (pyarrow.array(["one", "two"]), pyarrow.chunked_array([["one"], ["two"]])):
        ids = sqlite_client.enqueue_many(column)
        assert [sqlite_client.get(job_id).prompt for job_id in ids] == ["one", "two"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"prompt", "prompts: is a single bytes; give an iterable of prompts or rows, such as a list"),
        ({"prompt": "one"}, "prompts: is a single dict; give an iterable of prompts or rows"),
        (7, "prompts: int is neither an iterable of prompts nor a table; collect a lazy table, and give"),
        (Polars([{"text": "one"}]), "prompts: the table has no column prompt or messages; a template"),
        (Polars([{"prompt": "one", "label": 1}]), "prompts: the table column 'label' is not supported"),
        (Stream([{"prompt": "one", "label": 1}]), "prompts: the table column 'label' is not supported"),
    ],
)
def test_what_is_not_many_prompts_is_refused_before_anything_is_queued(
    sqlite_client: Client, source: Any, said: str
) -> None:
    for call in (sqlite_client.submit_batch, sqlite_client.enqueue_many):
        with pytest.raises(InvalidRequestError) as caught:
            call(source)
        assert str(caught.value).startswith(said) and caught.value.field == "prompts"
    assert sqlite_client.list_jobs() == sqlite_client.list_batches() == []


def test_a_text_is_not_its_letters_and_a_path_is_a_file(sqlite_client: Client, tmp_path: Path) -> None:
    for source in ("prompt", tmp_path / "prompts.jsonl"):
        with pytest.raises(InvalidRequestError, match=r"^prompts: "):
            sqlite_client.enqueue_many(source)  # type: ignore[arg-type]
    assert sqlite_client.list_jobs() == []


def test_results_and_errors_come_back_as_columns(sqlite_client: Client) -> None:
    batch = sqlite_client.submit_batch([*ROWS, {"prompt": 3}], name="night", seed=2**62 + 1)
    worker = Claims(sqlite_client.database, "a" * 32)
    worker.register("host", 1, "model", None)
    first, second = (jobs_of(batch)[number] for number in (1, 2))
    finish(worker, [first])
    finish(worker, [second], StopReason.DEADLINE)
    table = batch.to_arrow()
    assert table.schema.names == [
        *("custom_id", "id", "text", "stop_reason"),
        *("prompt_tokens", "completion_tokens", "seed", "answers"),
        *("content", "reasoning", "tool_calls", "embedding", "cached_tokens", "reasoning_tokens"),
        *("gpu_seconds", "energy_joules", "relevance"),
    ]
    assert table.to_pylist() == [
        {
            "custom_id": "a",
            "id": first.id,
            "text": "text of one",
            "stop_reason": "eos",
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "seed": 2**62 + 1,
            "answers": None,
            "content": None,
            "reasoning": None,
            "tool_calls": None,
            "embedding": None,
            "cached_tokens": 0,
            "reasoning_tokens": 0,
            "gpu_seconds": None,
            "energy_joules": None,
            "relevance": None,
        }
    ]
    assert batch.to_arrow(errors=True).column("code").to_pylist() == ["deadline", "invalid_value"]


def test_nothing_to_score_queues_nothing(sqlite_client: Client) -> None:
    with pytest.raises(InvalidParameterError, match="score: there is no text; give at least one"):
        sqlite_client.score("Once", [])
    assert not sqlite_client.list_jobs()


def test_no_results_are_columns_without_rows(sqlite_client: Client) -> None:
    table = sqlite_client.submit_batch(["one"]).to_arrow()
    assert (table.num_rows, table.num_columns) == (0, 17)


def test_what_is_not_installed_is_named_with_its_extra(
    sqlite_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = sqlite_client.submit_batch(["one"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"to_pandas needs pandas: pip install .*\[pandas\]"):
        batch.to_pandas()
    table = sqlite_client.submit_batch([{"a": 1}], template="{{ a }}")
    with pytest.raises(MissingExtraError, match="to_pandas needs pandas"):
        table.to_pandas()
    stream = Stream(ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"need pyarrow: pip install .*\[parquet\]"):
        batch.to_arrow()
    with pytest.raises(MissingExtraError, match="Arrow tables need pyarrow"):
        sqlite_client.submit_batch(stream)
    assert len(sqlite_client.enqueue_many(Polars(ROWS))) == 2  # without pyarrow
