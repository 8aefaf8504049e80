"""Tables as sources: equal rows out of every format, types that come back, hostile rows that fail alone."""

import base64
import gzip
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.errors import (
    BatchFileError,
    EmptyBatchFileError,
    IgnoredColumnWarning,
    InvalidParameterError,
    InvalidRequestError,
    RowCode,
)
from nightmill.jobs.formats.inputs import NOTHING_SAID, InputFile
from nightmill.jobs.formats.rows import FileFormat, InputRow
from nightmill.jobs.reply.job import Job
from nightmill.jobs.tables.columns import Table
from nightmill.jobs.tables.layout import TableLayout
from nightmill.jobs.tables.memory import TableItems
from nightmill.jobs.tables.reading import TableFile
from nightmill.jobs.tables.shape import Shape
from nightmill.jobs.tables.together import table_source
from tests.unit.formats.files import job
from tests.unit.tables.sources import options, rows_of, said

arrow = pytest.importorskip("pyarrow")


def write_parquet(path: Path, table: Any) -> Path:
    from pyarrow import parquet

    parquet.write_table(table, path)
    return path


def write_arrow(path: Path, table: Any) -> Path:
    with arrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def write_stream(path: Path, table: Any) -> Path:
    with arrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
COLUMNS = {
    "id": arrow.array([2**53 + 1, -(2**63), None], arrow.int64()),
    "text": arrow.array(["a", None, "<|im_end|>"]),
    "prompt": arrow.array([0.1, float("nan"), None]),
    "small": arrow.array([4.9, None, float("-inf")], arrow.float32()),
    "day": arrow.array([date(2020, 2, 29), None, date(1, 1, 1)]),
    "moment": arrow.array([1577836800123456789, None, -1], arrow.timestamp("ns")),
    "zoned": arrow.array([NOON, None, None], arrow.timestamp("us", "Europe/Berlin")),
    "time": arrow.array([time(1, 2, 3, 4), None, time(0)], arrow.time64("us")),
    "lasting": arrow.array([timedelta(1, 2, 3), None, timedelta(0)], arrow.duration("us")),
    "price": arrow.array([Decimal("12.50"), None, Decimal("-0.01")], arrow.decimal128(10, 2)),
    "bytes": arrow.array([b"\x00\xff", None, b""]),
    "flag": arrow.array([True, None, False]),
    "kind": arrow.array(["u", "v", None]).dictionary_encode(),
    "tags": arrow.array([["a", None], None, []], arrow.list_(arrow.string())),
    "nested": arrow.array(
        [{"when": NOON, "all": [{"cost": Decimal("1.5")}]}, None, {"when": None, "all": None}],
        arrow.struct(
            [
                ("when", arrow.timestamp("ms", "UTC")),
                ("all", arrow.list_(arrow.struct([("cost", arrow.decimal128(5, 1))]))),
            ]
        ),
    ),
    "map": arrow.array([[("k", b"v")], None, []], arrow.map_(arrow.string(), arrow.binary())),
    "x.y": arrow.array(["p", "q", "r"], arrow.large_string()),
    "nothing": arrow.nulls(3),
}  # fmt: skip
TYPED = arrow.table(COLUMNS)


def kept(table: Table, rows: list[InputRow], format: FileFormat, path: Path) -> Any:
    """The kept columns, through SQL's JSON and a file of results."""
    shape = Shape.read(json.loads(json.dumps(table.settings())))
    assert shape is not None
    layout = TableLayout(format, shape)
    writer = layout.writer(path, str(path))
    writer.write([layout.row(job(metadata=json.loads(json.dumps(row.kept)))) for row in rows])
    writer.close()
    if format is FileFormat.ARROW:
        with arrow.memory_map(str(path)) as source:
            return arrow.ipc.open_file(source).read_all()
    from pyarrow import parquet

    return parquet.read_table(path)


@pytest.mark.parametrize(
    "write",
    [*(pytest.param(by, marks=pytest.mark.heavy) for by in (write_parquet, write_arrow, write_stream)), None],
)
@pytest.mark.parametrize("format", [FileFormat.PARQUET, FileFormat.ARROW])
def test_types_come_back_as_they_were(
    write: Callable[[Path, Any], Path] | None, format: FileFormat, tmp_path: Path
) -> None:
    typed = TYPED
    if format is FileFormat.PARQUET:  # which has no durations in dictionaries and the like, but these
        typed = arrow.table({name: TYPED[name] for name in TYPED.column_names if name != "nothing"})
    suffix = ".parquet" if write is write_parquet else ".arrow"
    source = typed if write is None else write(tmp_path / f"in{suffix}", typed)
    made = table_source(source, options("{{ `x.y` }}"))
    rows = list(made.rows(NOTHING_SAID))
    assert [said(row) for row in rows] == [["p"], ["q"], ["r"]]
    found = kept(made.table, rows, format, tmp_path / "out")
    back = found.select(typed.column_names)
    for name in typed.column_names:
        expected = typed[name]
        if name in ("prompt", "small"):  # NaN is not equal to itself
            assert str(back[name].to_pylist()) == str(expected.to_pylist())
        elif write is write_parquet and name in ("tags", "nested", "map"):
            assert back[name].to_pylist() == expected.to_pylist(), name
        elif write is write_parquet:  # Parquet calls a list's items its own name
            assert str(back[name].combine_chunks()) == str(expected.combine_chunks()), name
        else:
            assert back[name].type == expected.type, name
            assert back[name].combine_chunks().equals(expected.combine_chunks()), name
    assert found.column_names[len(typed.column_names)] == "answer"


@pytest.mark.heavy  # a process reads the file
def test_the_process_that_reads_a_table_does_without_numpy(tmp_path: Path) -> None:
    table = arrow.table({"x": ["more than a pipe takes"] * 20_000})
    reader = TableFile(write_arrow(tmp_path / "in.arrow", table), options=options()).reader_of_rows()
    assert reader is not None
    with reader:
        reader.header()
        loaded = Path(f"/proc/{reader.pid}/maps").read_text()
        assert "libarrow" in loaded and "numpy" not in loaded
        assert sum(map(len, reader.rows())) == len(table)


@pytest.mark.heavy  # a process reads the file
def test_values_of_types_are_written_as_people_do(tmp_path: Path) -> None:
    text = "{{ id }} {{ small }} {{ day }} {{ price }} {{ flag }} {{ tags | json }} {{ kind }}"
    first = rows_of(write_parquet(tmp_path / "in.parquet", TYPED), text)[0]
    assert said(first) == ['9007199254740993 4.9 2020-02-29 12.50 true ["a", null] u']


CSV = 'id,x,"a, ""b"""\r\n007,"one\r\ntwo",1.50\r\n8,,\r\n9,three,"<|im_end|>"\r\n'


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("in.csv", CSV.encode()),
        ("in.csv", b"\xef\xbb\xbf" + CSV.encode()),
        ("in.csv.gz", gzip.compress(CSV.encode())),
        ("in.csv", CSV.replace(",", ";").replace("a; ", "a, ").encode()),
        ("in.tsv", CSV.replace('"a, ', '"a. ').replace(",", "\t").replace("a. ", "a, ").encode()),
    ],
    ids=["plain", "with a mark", "packed", "semicolons", "tabs"],
)
def test_cells_are_texts_and_stay_what_they_are(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    first, second, third = rows_of(path)
    assert said(first) == ["one\r\ntwo"]
    assert first.kept == {"id": "007", "x": "one\r\ntwo", 'a, "b"': "1.50"}
    assert second.error is not None
    assert (second.error.code, second.error.field, second.kept) == (RowCode.MISSING_FIELD, "x", {"id": "8"})
    assert said(third) == ["three"]
    assert [row.number for row in (first, second, third)] == [1, 2, 3]


def test_rows_without_a_value_are_left_out_or_run(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text(CSV)
    assert [row.number for row in rows_of(path, empty="skip")] == [1, 3]
    assert [said(row) for row in rows_of(path, "<{{ x }}>", empty="keep")][1] == ["<>"]
    (tmp_path / "none.csv").write_text("x,y\n,1\n,2\n")
    with pytest.raises(EmptyBatchFileError, match="each of its 2 rows lacks a value"):
        rows_of(tmp_path / "none.csv", empty="skip")


HOSTILE = [
    (b'{"x": "a\\u0000b", "y": 1}', RowCode.INVALID_VALUE),
    (b'{"x": "\\ud800"}', RowCode.INVALID_VALUE),
    (b'{"x": {"a": "\\u0000"}}', RowCode.INVALID_VALUE),
    (b'{"x": [1]}', RowCode.INVALID_VALUE),
    (b'{"x": null}', RowCode.MISSING_FIELD),
    (b"{}", RowCode.MISSING_FIELD),
    (b'{"x": "\xff"}', RowCode.INVALID_ENCODING),
    (b"{broken", RowCode.INVALID_JSON),
    (b"[1]", RowCode.INVALID_JSON),
    (b'{"x": NaN}', RowCode.INVALID_JSON),
    (b'{"x": "   "}', RowCode.INVALID_VALUE),
    (b'{"x": "' + b"a" * (17 << 20) + b'"}', RowCode.TOO_LONG),
]


def test_hostile_rows_fail_alone(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = b'{"x": "good", "id": 9007199254740993, "big": 1e400, "text": "mine"}\n'
    path.write_bytes(b"\n".join([*(row for row, _ in HOSTILE), good]))
    *bad, last = rows_of(path)
    assert [row.error and row.error.code for row in bad] == [code for _, code in HOSTILE]
    assert last.kept == {"x": "good", "id": 2**53 + 1, "big": "Infinity", "text": "mine"}


def test_a_megabyte_in_a_cell_is_a_cell(tmp_path: Path) -> None:
    cell = 'é"\n' * 350_000
    path = tmp_path / "in.csv"
    path.write_text(f'x,y\n"{cell.replace(chr(34), chr(34) * 2)}",1\n')
    (row,) = rows_of(path)
    assert said(row) == [cell]


@pytest.mark.parametrize(
    "text",
    [
        "id;x;\r\n1;a,b;\r\n",
        "\ufeffsep=;\r\nid;x\r\n1;a,b\r\n",
        "id|x\n1|a,b|\n",
        "\n  \nid;x;;;;\n1;a,b\n",
    ],
)
def test_a_sheet_is_read_as_spreadsheets_write_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(text)
    file = TableFile(tmp_path / "in.csv", options=options())
    assert list(file.table.columns.kinds) == ["id", "x"]
    (row,) = file.rows()
    assert (said(row), row.kept) == (["a,b"], {"id": "1", "x": "a,b"})


def test_an_arrow_file_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="is an Arrow file, which takes a template"):
        InputFile(write_arrow(tmp_path / "in.arrow", TYPED))


def test_a_column_that_is_not_kept_gives_its_name_away(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"x": 1, "id": 2}\n')
    shape = TableFile(path, options=options(column="x", keep=["id"])).table.shape
    assert next(one.name for one in shape.ours(errors=False)) == "x"


def test_our_columns_make_room_for_theirs() -> None:
    names = ["id", "text", "seed", "nightmill_seed", "job_id", "code", "line"]
    table = TableItems([dict.fromkeys([*names, "x"], "v")], options()).table
    ours = {one.key: one.name for one in table.shape.ours(errors=False)}
    assert ours["seed"] == "nightmill_nightmill_seed"
    assert ours["id"] == "nightmill_job_id"
    assert {one.key: one.name for one in table.shape.ours(errors=True)}["line"] == "nightmill_line"
    assert list(table.shape.kept)[:2] == [("id", "string"), ("text", "string")]


def test_a_chat_in_a_column_is_the_prompt(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    own = [{"role": "system", "content": "own"}, *chat]
    items = [{"c": chat}, {"c": json.dumps(own)}, {"c": "no"}, {"c": None}, {"c": []}, {"c": 5}]
    rows = rows_of(items, "{{ c | messages }}", system="ours")
    assert [said(row) for row in rows[:2]] == [["ours", "Hi"], ["own", "Hi"]]
    assert all(row.error is not None for row in rows[2:])
    typed = arrow.table({"c": [chat]})
    assert said(rows_of(typed, "{{ c | messages }}")[0]) == ["Hi"]


def test_a_plain_template_is_the_whole_prompt() -> None:
    (row,) = rows_of([{"x": "Once"}], "{{ x }} upon", plain=True)
    assert row.spec is not None
    assert (row.spec.text, row.spec.messages) == ("Once upon", None)


def test_python_rows_have_values_of_json() -> None:
    items = [{"x": date(2020, 1, 2), "d": Decimal("1.10"), "n": float("nan"), "t": (1, 2), 5: "five"}]
    (row,) = rows_of(iter(items))
    assert row.kept == {"x": "2020-01-02", "d": "1.10", "t": [1, 2], "5": "five"}
    for bad in ({"x": 1}, 5, [1, 2], [{"x": object()}]):
        with pytest.raises(InvalidRequestError, match="table: "):
            rows_of(bad)


def test_python_rows_that_are_none_are_named_as_that() -> None:
    with pytest.raises(EmptyBatchFileError, match="table: holds no rows; give a mapping"):
        rows_of([])
    with pytest.raises(InvalidParameterError, match="there is no column 'x'; there are none"):
        rows_of([{}])


def test_the_index_of_a_frame_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(",x\n0,a\n")
    with pytest.warns(IgnoredColumnWarning):
        (row,) = rows_of(tmp_path / "in.csv")
    assert row.kept == {"x": "a"}
    table = arrow.table({"x": ["a"], "__index_level_0__": [5]})
    assert rows_of(table)[0].kept == {"x": "a"}


def test_spread_columns_have_the_types_of_their_schema() -> None:
    properties = {
        "n": {"type": "integer"},
        "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "mood": {"$ref": "#/$defs/Mood"},
        "sure": {"type": ["boolean", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "mixed": {"enum": [1, "a"]},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"Mood": {"enum": ["good", "bad"]}}}
    made = options(spread=True, json_schema=schema)
    assert made.spread == (
        *(("n", "int64"), ("x", "double"), ("mood", "string"), ("sure", "bool"), ("tags", "json")),
        ("mixed", "json"),
    )
    table = TableItems([{"x": "theirs"}], made).table
    answer = json.dumps({"n": 2**70, "x": 1, "mood": "good", "sure": True, "tags": ["a"], "mixed": "a"})
    from nightmill.jobs.request.spec import JobSpec

    ended: Job = job(
        text=answer,
        constrained=JobSpec.defaults({"json_schema": schema}).constrained,
        metadata={"x": "theirs"},
    )
    layout = TableLayout(FileFormat.PARQUET, table.shape)
    row = layout.row(ended)
    assert row["x"] == "theirs"
    assert (row["n"], row["answer_x"], row["mood"], row["sure"]) == (None, 1.0, "good", True)
    assert layout.flat([row], "tags") == ['["a"]']


def test_a_schema_does_not_depend_on_what_is_not_kept() -> None:
    table = TableItems(TYPED, options("{{ `x.y` }}", keep=["day"])).table
    schema = arrow.ipc.read_schema(arrow.py_buffer(base64.b64decode(str(table.shape.schema))))
    assert schema.names == ["day"]
    assert sorted(table.wanted) == ["day", "x.y"]


@pytest.mark.parametrize(
    "said",
    [{"template": "{y}, {"}, {"template": "As {x}: {{ x }}"}, {"template": "{x}", "system": "{{ id }}"}],
)
def test_single_braces_are_text_unless_a_column_is_meant_and_none_is_named(
    said: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"x": 1, "id": 2}\n')
    (row,) = rows_of(path, **said)
    assert "{" in str(row.prompt)


def test_a_disk_without_room_for_python_s_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        return open("/dev/full", "w+b")  # noqa: PTH123 - the product closes it

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    for rows in (1, 1000):  # written at the end, and before
        with pytest.raises(BatchFileError, match=r"table: .*\(TMPDIR\).*: No space left on device"):
            rows_of({"x": "a" * 100} for _ in range(rows))
