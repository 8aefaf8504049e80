"""Tables with a template as batches: entered once, read with SQL, and answers beside what was kept."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BatchConflictError, BatchFileError, InvalidParameterError
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.tables import BatchRow
from tests.integration.jobs.batches.rows import jobs_of

arrow = pytest.importorskip("pyarrow")
WEATHER = Path(__file__).parents[2] / "support" / "seattle-weather.csv"
"""Days of Seattle, 2012 to 2015, by NOAA, as the package vega_datasets has them; nobody's copyright."""
ASK = "What kind of day is this? {{ weather }}, {{ temp_max }} degrees"


@pytest.fixture
def client(server_settings: Settings) -> Iterator[Client]:
    with Client(server_settings) as client:
        yield client


@pytest.fixture
def worker(client: Client) -> Claims:
    claims = Claims(client.database, "a" * 32)
    claims.register("host", 1, "model", None)
    return claims


def answer(worker: Claims, batch: Batch, said: str = "good", *, failing: int = 0) -> None:
    """End each queued row of a batch, the one of that number with an error."""
    queued = [job for job in jobs_of(batch).values() if not job.state.final]
    rows = {job.id: job.row for job in queued}
    for at in range(0, len(queued), 256):
        outcomes = []
        for claim in worker.claim([job.id for job in queued[at : at + 256]]):
            failed = rows[claim.job_id] == failing
            reason = StopReason.ERROR if failed else StopReason.EOS
            error = "it broke" if failed else None
            outcomes.append(Outcome(claim.job_id, claim.attempt, reason, said, 3, 5, error=error))
        worker.finish(outcomes)


def read_csv(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def test_a_real_table_comes_back_with_a_column_more_in_any_format(
    client: Client, worker: Claims, tmp_path: Path
) -> None:
    source = read_csv(WEATHER)
    batch = client.submit_batch(
        WEATHER, template=ASK, system="Be short.", column="kind", choice=["good", "bad"]
    )
    assert batch.status().rows == len(source) == 1461
    first = jobs_of(batch)[1]
    assert first.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What kind of day is this? drizzle, 12.8 degrees"},
    ]
    answer(worker, batch, failing=3)
    for suffix in (".csv", ".tsv", ".jsonl", ".parquet", ".arrow"):
        out = tmp_path / f"out{suffix}"
        assert batch.write_results(out) == 1460
        rows: list[Any]
        if suffix in (".csv", ".tsv"):
            rows = read_csv(out, "\t" if suffix == ".tsv" else ",")
        elif suffix == ".jsonl":
            rows = [json.loads(line) for line in out.read_text().splitlines()]
        elif suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(out).to_pylist()
        else:
            with arrow.memory_map(str(out)) as file:
                rows = arrow.ipc.open_file(file).read_all().to_pylist()
        names = list(source[0])
        assert [{name: row[name] for name in names} for row in rows] == source[:2] + source[3:]
        assert list(rows[0])[: len(names) + 1] == [*names, "kind"]
        assert {row["kind"] for row in rows} == {"good"}
        assert batch.write_results(out) == 1460  # it is known again
    assert batch.write_errors(tmp_path / "errors.csv") == 1
    (bad,) = read_csv(tmp_path / "errors.csv")
    assert (bad["date"], bad["message"], bad["line"], bad["kind"]) == ("2012/01/03", "it broke", "3", "good")


@pytest.mark.parametrize("template", [None, "Say: {{ prompt }}"])
def test_a_csv_comes_back_with_its_delimiter_and_mark_and_a_file_begun_without_goes_on(
    client: Client, worker: Claims, tmp_path: Path, template: str | None
) -> None:
    source = tmp_path / "in.csv"
    source.write_text("\ufeffprompt;seed\r\nein, zwei;1\r\ndrei;2\r\n", encoding="utf-8")
    batch = client.submit_batch(source, template=template)
    stored = batch.record.settings
    assert stored is not None and stored["csv"] == {"delimiter": ";", "byte_order_mark": True}
    answer(worker, batch, "gut; sehr gut")
    out, kept = tmp_path / "out.csv", tmp_path / "kept.csv"
    assert batch.write_results(out) == 2
    with out.open(newline="", encoding="utf-8-sig") as file:
        first, _ = csv.DictReader(file, delimiter=";")
    assert first["text" if template is None else "answer"] == "gut; sehr gut"
    assert out.read_bytes().startswith(b"\xef\xbb\xbf")
    with client.database.write() as connection:  # as a version before entered it
        connection.execute(
            update(BatchRow)
            .where(BatchRow.name == batch.name)
            .values(settings={name: value for name, value in stored.items() if name != "csv"})
        )
    older = client.submit_batch(source, template=template)
    assert older.name == batch.name  # it is the same batch
    assert older.write_results(kept) == 2 and not kept.read_bytes().startswith(b"\xef\xbb\xbf")
    for path in (out, kept):
        before = path.read_bytes()
        assert older.write_results(path) == batch.write_results(path) == 2
        assert path.read_bytes() == before


def test_what_was_kept_is_read_with_sql(client: Client) -> None:
    table = arrow.table({"id": [2**53 + 1, 7], "x": ["a", None]})
    batch = client.submit_batch(table, template="{{ x }}", name="kept")
    value = "json_extract(metadata, '$.id')" if client.database.is_sqlite else "metadata ->> 'id'"
    query = text(f"SELECT {value} FROM jobs WHERE batch = 'kept' ORDER BY row")
    with client.database.read() as connection:
        found = [int(one) for (one,) in connection.execute(query)]
    assert found == [2**53 + 1, 7]
    assert jobs_of(batch)[2].errors[0]["field"] == "x"


def test_a_table_is_entered_once_and_another_template_is_another_batch(
    client: Client, worker: Claims, tmp_path: Path
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("id,x\n1,a\n2,b\n")
    first = client.submit_batch(path, template="{{ x }}")
    answer(worker, first)
    again = client.submit_batch(path, template="{{ x }}")
    assert (again.name, again.status().succeeded) == (first.name, 2)
    others: list[dict[str, Any]] = [
        {"template": "{{ x }}!"},
        *({"template": "{{ x }}"} | more for more in ({"system": "s"}, {"keep": ["id"]}, {"column": "c"})),
    ]
    for other in others:
        assert client.submit_batch(path, **other).name != first.name
        with pytest.raises(BatchConflictError, match="other settings"):
            client.submit_batch(path, name=first.name, **other)


def test_a_schema_of_another_pyarrow_is_the_same_table(client: Client, tmp_path: Path) -> None:
    from pyarrow import parquet

    path = tmp_path / "in.parquet"
    parquet.write_table(arrow.table({"x": ["a"]}), path)
    batch = client.submit_batch(path, template="{{ x }}")
    with client.database.write() as connection:
        kept = dict(batch.record.settings or {})
        kept["table"] = {**kept["table"], "schema": "AAAA"}  # type: ignore[dict-item]
        connection.execute(
            text("UPDATE batches SET settings = :kept WHERE name = :name"),
            {"kept": json.dumps(kept), "name": batch.name},
        )
    assert client.submit_batch(path, template="{{ x }}").name == batch.name


def test_rows_that_are_left_out_do_not_hold_the_batch_open(client: Client, worker: Claims) -> None:
    batch = client.submit_batch([{"x": "a"}, {"x": None}, {"x": "c"}], template="{{ x }}", empty="skip")
    answer(worker, batch)
    status = batch.status()
    assert (status.rows, str(status.state)) == (2, "completed")
    assert sorted(jobs_of(batch)) == [1, 3]


def test_results_of_tables_in_python_have_their_types(client: Client, worker: Claims) -> None:
    table = arrow.table({"n": arrow.array([1, 2], arrow.int8()), "x": ["a", "b"]})
    batch = client.submit_batch(table, template="{{ x }}", keep=["n"], column="label")
    answer(worker, batch)
    found = batch.to_arrow()
    assert found.schema.field("n").type == arrow.int8()
    assert found.select(["n", "label"]).to_pylist() == [{"n": 1, "label": "good"}, {"n": 2, "label": "good"}]


class Capsule:
    """As much of a frame of pandas, Polars or DuckDB as is used: a stream of Arrow."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_whatever_speaks_arrow_is_a_table(client: Client) -> None:
    batch = client.submit_batch(Capsule(arrow.table({"x": ["a"]})), template="{{ x }}")
    assert jobs_of(batch)[1].metadata == {"x": "a"}


def test_a_file_of_another_table_is_not_replaced(client: Client, worker: Claims, tmp_path: Path) -> None:
    one = client.submit_batch([{"x": "a"}], template="{{ x }}")
    two = client.submit_batch([{"x": "b"}], template="{{ x }}")
    for batch in (one, two):
        answer(worker, batch)
    for suffix in (".csv", ".jsonl", ".parquet", ".arrow"):
        out = tmp_path / f"out{suffix}"
        one.write_results(out)
        with pytest.raises(BatchFileError, match="is there already"):
            two.write_results(out)


def test_nothing_is_entered_of_a_table_that_is_refused(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("x\na\n")
    with pytest.raises(InvalidParameterError, match="there is no column 'y'; there are 'x'"):
        client.submit_batch(path, template="{{ y }}", name="refused")
    assert client.list_batches() == []


def test_a_large_table_takes_the_memory_of_a_small_one(tmp_path: Path) -> None:
    import tracemalloc

    from nightmill.jobs.formats.inputs import NOTHING_SAID
    from nightmill.jobs.tables.options import TableOptions
    from nightmill.jobs.tables.reading import TableFile

    options = TableOptions.of({"template": "{{ x }}"})
    assert options is not None
    peaks, sizes = [], []
    for rows in (2_000, 16_000):
        path = tmp_path / f"{rows}.csv"
        path.write_text("id,x\n" + "".join(f"{number},{'word ' * 20}\n" for number in range(rows)))
        sizes.append(path.stat().st_size)
        tracemalloc.start()
        assert sum(1 for _ in TableFile(path, options=options).rows(NOTHING_SAID)) == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Of the further 14,000 rows nothing stays; threads that earlier tests have left may allocate meanwhile.
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 4
