"""How long it takes to read what strangers write, at each door, for n, 2n and 4n.

`python -m benchmarks.abuse --part doors` prints the table. All of it is read in this process, as a server or
a worker reads it; Parquet, templates and grammars go through the processes that they are confined to.
"""

import io
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow
from pyarrow import parquet
from python_multipart.multipart import parse_options_header
from starlette.requests import cookie_parser

from nightmill.jobs.calls import Calls
from nightmill.jobs.contract import CallFormat, Constrained, ConstraintKind, Tools
from nightmill.jobs.errors import NightmillError
from nightmill.jobs.formats import FileFormat, InputFile
from nightmill.jobs.formats.csvfile import read_csv
from nightmill.jobs.formats.jsonlines import parse_object, read_objects
from nightmill.jobs.schemas import check_schema
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.forms import Form
from nightmill.jobs.spec import JobSpec
from nightmill.worker.grammar.checker import Checker
from nightmill.worker.grammar.checker import Limits as GrammarLimits
from nightmill.worker.model.chat.renderer import Limits, Renderer

TIMES = (1, 2, 4)
TRIES = 3  # of which the fastest counts

Work = Callable[[], object]


@dataclass(frozen=True)
class Door:
    """Something that reads what strangers write; `prepare` makes the work of a size."""

    says: str
    size: int
    prepare: Callable[[int], Work]
    clock: Callable[[], float] = field(default_factory=lambda: processor_time)


def body(says: str, size: int, made: Callable[[int], bytes]) -> Door:
    """A body of JSON, parsed and checked as POST /v1/jobs does."""

    def prepare(size: int) -> Work:
        content = made(size)
        return lambda: JobSpec.parse(parse_object(content))

    return Door(f"JSON: {says}", size, prepare)


def repeated(count: int) -> bytes:
    """An object with so many keys, of which the last one is there twice."""
    return b"{" + b",".join(b'"%d":1' % number for number in [*range(count), count - 1]) + b"}"


def bodies() -> Iterator[Door]:
    """Bodies and lines of JSON."""
    yield body("keys, the last one twice", 50_000, repeated)
    yield body(
        "unknown keys", 50_000, lambda size: json.dumps(dict.fromkeys(map(str, range(size)), 1)).encode()
    )
    yield body("one unknown key, bytes", 1 << 20, lambda size: json.dumps({"k" * size: 1}).encode())
    yield body("nested lists", 200, lambda size: b'{"prompt":' + b"[" * size + b"]" * size + b"}")
    yield body("empty lists", 60_000, lambda size: b'{"metadata":{"a":[' + b"[]," * size + b"1]}}")
    yield body("a text, bytes", 3 << 20, lambda size: json.dumps({"prompt": "a" * size}).encode())
    yield body("escapes", 1 << 19, lambda size: b'{"prompt":"' + b"\\u00e9" * size + b'"}')
    yield body(
        "backslashes in metadata",
        1 << 19,
        lambda size: json.dumps({"prompt": "a", "metadata": {"a": "\\" * size}}).encode(),
    )
    yield body("digits of a number", 1 << 20, lambda size: b'{"temperature":0.' + b"1" * size + b"}")
    yield body("token ids", 200_000, lambda size: json.dumps({"prompt": [7] * size}).encode())
    yield body(
        "messages",
        10_000,
        lambda size: json.dumps({"messages": [{"role": "user", "content": "a"}] * size}).encode(),
    )
    yield body(
        "choices",
        2_000,
        lambda size: json.dumps({"prompt": "a", "choice": [f"c{number}" for number in range(size)]}).encode(),
    )
    lines = Door(
        "JSON lines that repeat a key",
        1_000,
        lambda size: lambda: list(read_objects(io.BytesIO(b'{"a":1,"a":2}\n' * size))),
    )
    yield lines


def schema(says: str, size: int, made: Callable[[int], object]) -> Door:
    """A JSON schema, checked as a server does."""

    def prepare(size: int) -> Work:
        value = made(size)
        assert isinstance(value, dict)
        return lambda: check_schema(value)

    return Door(f"schema: {says}", size, prepare)


def properties(count: int) -> dict[str, object]:
    """A schema of an object with so many properties."""
    return {"properties": {f"p{number}": {"type": "string"} for number in range(count)}}


def schemas() -> Iterator[Door]:
    """Schemas."""
    yield schema("properties", 5_000, properties)
    yield schema(
        "properties below a long name", 2_000,
        lambda size: {"properties": {"k" * size * 8: properties(size)}},
    )  # fmt: skip
    yield schema(
        "references to one place",
        2_000,
        lambda size: {"anyOf": [{"$ref": "#/$defs/a"}] * size, "$defs": {"a": {}}},
    )


def csv(says: str, size: int, made: Callable[[int], str]) -> Door:
    """A CSV file."""

    def prepare(size: int) -> Work:
        text = made(size)
        return lambda: sum(1 for _ in read_csv(io.StringIO(text), "rows.csv"))

    return Door(f"CSV: {says}", size, prepare)


def tables() -> Iterator[Door]:
    """CSV."""
    yield csv("rows", 10_000, lambda size: "prompt\n" + "Once\n" * size)
    yield csv("cells of one row", 200_000, lambda size: "prompt\n" + "a," * size + "\n")
    yield csv("columns", 50_000, lambda size: ",".join(["prompt"] * size) + "\n")
    yield csv("quotes that stay open, lines", 200_000, lambda size: 'prompt\n"' + "Once\n" * size)
    yield csv("quotes", 500_000, lambda size: 'prompt\n"' + '""' * size + '"\n')


def parquet_door(folder: Path, says: str, size: int, made: Callable[[int], object]) -> Door:
    """A Parquet file, read as a stranger's."""

    def prepare(size: int) -> Work:
        path = folder / f"{says}-{size}.parquet".replace(" ", "-")
        options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "store_schema": False}
        parquet.write_table(pyarrow.table({"prompt": made(size)}), path, **options)
        return lambda: sum(1 for _ in InputFile(path, FileFormat.PARQUET, trusted=False).rows())

    return Door(f"Parquet: {says}", size, prepare)


def parquets(folder: Path) -> Iterator[Door]:
    """Parquet."""

    def one_text(rows: int, length: int) -> object:
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["a" * length])

    yield parquet_door(folder, "rows of one text of 100 bytes", 20_000, lambda size: one_text(size, 100))
    yield parquet_door(folder, "one text in 8 rows, bytes", 1 << 20, lambda size: one_text(8, size))
    yield parquet_door(
        folder, "rows that are null", 20_000, lambda size: pyarrow.nulls(size, pyarrow.string())
    )
    yield parquet_door(folder, "one text in 256 rows, bytes", 10 << 20, lambda size: one_text(256, size))


def form(size: int, *, header: bool) -> Work:
    """A form with a file of so many bytes, or with such a header."""
    name = "x" * size if header else "rows"
    head = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
    content = head + (b"" if header else b"\r\n-" * (size // 3)) + b"\r\n--x--\r\n"

    def read() -> None:
        one = Form("multipart/form-data; boundary=x")
        for at in range(0, len(content), 1 << 16):
            one.feed(content[at : at + (1 << 16)])

    return read


def heads() -> Iterator[Door]:
    """Forms and headers. A head may have 64 KiB."""
    yield Door("form: bytes that look like a boundary", 1 << 20, lambda size: form(size, header=False))
    yield Door("form: a name of many bytes", 1 << 16, lambda size: form(size, header=True))
    yield Door(
        "header: a quoted parameter of semicolons",
        4_000,
        lambda size: lambda: parse_options_header('a; b="' + ";" * size),
    )
    yield Door("header: parameters", 2_000, lambda size: lambda: parse_options_header("a" + ";a=b" * size))
    yield Door("header: cookies", 4_000, lambda size: lambda: cookie_parser("a=b;" * size))


def replies() -> Iterator[Door]:
    """What a model writes, which a stranger may have it write."""
    tools = Tools([{"type": "function", "function": {"name": "f"}}])

    def fenced(size: int) -> Work:
        text = "```json" + " " * size + "x y" + " " * size + "z"
        return lambda: [*(calls := Calls(CallFormat.JSON, tools)).push(text), *calls.end()]

    def marks(size: int) -> Work:
        text = "<tool_call>{" + "</tool_call>" * size
        return lambda: [*(calls := Calls(CallFormat.HERMES, tools)).push(text), *calls.end()]

    yield Door("answer: a fence around blanks", 20_000, fenced)
    yield Door("answer: ends of calls", 5_000, marks)


def workers(stack: ExitStack) -> Iterator[Door]:
    """What workers read in processes of their own."""
    checker = Checker(GrammarLimits())
    stack.callback(checker.close)

    def grammar(kind: ConstraintKind, made: Callable[[int], str]) -> Callable[[int], Work]:
        return lambda size: lambda: checker.check(Constrained(kind, made(size)))

    yield Door(
        "grammar: properties of a schema", 250,
        grammar(ConstraintKind.JSON_SCHEMA, lambda size: json.dumps(properties(size))),
    )  # fmt: skip
    yield Door(
        "grammar: choices", 1_000,
        grammar(ConstraintKind.CHOICE, lambda size: json.dumps([f"c{number}" for number in range(size)])),
    )  # fmt: skip
    yield Door(
        "grammar: a regular expression",
        1_000,
        grammar(ConstraintKind.REGEX, lambda size: "(a|b)" * (size // 5)),
    )
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    renderer = Renderer(source, {}, Limits(), "the template")
    stack.callback(renderer.close)

    def chat(size: int) -> Work:
        messages = [{"role": "user", "content": "a" * 100}] * size
        return lambda: renderer.render_all([{"messages": messages, "add_generation_prompt": True}])

    yield Door("template: messages", 5_000, chat)


def lasting(stack: ExitStack) -> Iterator[Door]:
    """The same, by a clock that goes on while a process that lives on works."""
    return (replace(door, clock=time.perf_counter) for door in workers(stack))


def seconds(work: Work, clock: Callable[[], float]) -> float:
    """The shortest of some tries; being refused counts."""
    found = []
    for _ in range(TRIES):
        began = clock()
        with suppress(NightmillError, HttpError, ValueError):
            work()
        found.append(clock() - began)
    return min(found)


def processor_time() -> float:
    """Seconds that this process and those it has ended took of a processor, whatever else ran there."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def show() -> None:
    """Print the table."""
    print("\nProcessor time; of grammars and templates, whose processes live on, time on the clock.\n")
    print("| what is read | n | ms for n / 2n / 4n | 4n : n |")
    print("| --- | --- | --- | --- |")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nightmill-bench-")))
        for doors in (bodies(), tables(), parquets(folder), schemas(), heads(), replies(), lasting(stack)):
            for door in doors:
                took = [seconds(door.prepare(door.size * times), door.clock) for times in TIMES]
                shown = " / ".join(f"{one * 1000:,.1f}" for one in took)
                print(f"| {door.says} | {door.size:,} | {shown} | {took[-1] / took[0]:.1f} |", flush=True)


if __name__ == "__main__":
    show()
