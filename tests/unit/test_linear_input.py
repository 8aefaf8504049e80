"""What strangers write is read in one pass: operations and bytes grow in proportion, whatever is written."""

import io
import itertools
import tracemalloc
from collections.abc import Callable

import pytest

from nightmill.jobs.base.contract import CallFormat, Tools
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats import csvfile, jsonlines
from nightmill.jobs.formats.csvfile import column_fault, read_csv
from nightmill.jobs.formats.jsonlines import parse_object
from nightmill.jobs.formats.rows import RowError
from nightmill.jobs.reply.tool_calls import Calls
from nightmill.jobs.request import prompts
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.request.schemas import check_schema

pytestmark = pytest.mark.heavy

SIZES = (1_000, 2_000, 4_000)
LINEAR = 2.5
"""By what twice as much input may multiply the cost, at most."""


class Counted(str):
    """A text that counts how often it is compared or hashed."""

    operations = 0

    def __eq__(self, other: object) -> bool:
        Counted.operations += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Counted.operations += 1
        return str.__hash__(self)


def operations(work: Callable[[], object]) -> int:
    Counted.operations = 0
    work()
    return Counted.operations


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_linear(costs: list[int]) -> None:
    assert costs[0] > 0
    for smaller, larger in itertools.pairwise(costs):
        assert larger <= LINEAR * smaller, costs


@pytest.mark.parametrize("repeated", ["first", "last", "all"])
def test_repeated_keys_of_an_object_are_found_in_one_pass(repeated: str) -> None:
    def read(count: int) -> None:
        names = [Counted("k") if repeated == "all" else Counted(number) for number in range(count)]
        again = Counted(names[0 if repeated == "first" else -1])
        with pytest.raises(InvalidRequestError, match="is there twice"):
            jsonlines._unique_keys([(name, 1) for name in (*names, again)])

    assert_linear([operations(lambda size=size: read(size)) for size in SIZES])  # type: ignore[misc]


def test_an_object_without_repeated_keys_is_read_in_one_pass() -> None:
    def read(count: int) -> None:
        jsonlines._unique_keys([(Counted(number), 1) for number in range(count)])

    assert_linear([operations(lambda size=size: read(size)) for size in SIZES])  # type: ignore[misc]


def test_a_repeated_key_of_megabytes_is_shown_in_part() -> None:
    key = b'"' + b"k" * 1_000_000 + b'":1'
    with pytest.raises(InvalidRequestError, match="is there twice") as caught:
        parse_object(b"{" + key + b"," + key + b"}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("empty", [b"[]", b"{}", b'{"":0}'])
def test_a_line_of_too_many_lists_and_objects_is_refused_before_they_are_made(empty: bytes) -> None:
    line = b'{"a":[' + b",".join([empty] * jsonlines.MOST_CONTAINERS) + b"]}"

    def read() -> None:
        with pytest.raises(InvalidRequestError, match="brackets and braces"):
            parse_object(line)

    assert peak_bytes(read) < 3 * len(line)
    few = b'{"a":[' + b",".join([empty] * 1000) + b"]}"
    assert len(parse_object(few)["a"]) == 1000


def test_columns_are_checked_in_one_pass() -> None:
    def check(count: int) -> None:
        names = [Counted(number) for number in range(count)]
        assert column_fault([Counted("prompt"), *names], frozenset({*names, "prompt"})) is None

    assert_linear([operations(lambda size=size: check(size)) for size in SIZES])  # type: ignore[misc]


def test_the_places_of_schemas_are_no_texts_until_one_is_refused() -> None:
    def check(count: int) -> None:
        below: dict[str, object] = {str(number): {} for number in range(count)}
        check_schema({"properties": {"k" * 1000 * count: {"properties": below}}})

    assert_linear([peak_bytes(lambda size=size: check(size)) for size in SIZES])  # type: ignore[misc]
    refused = {"properties": {"a": {"anyOf": [{}, {"items": {"not": {}}}]}}}
    with pytest.raises(ValueError, match="'not' at #/properties/a/anyOf/1/items cannot be enforced"):
        check_schema(refused)


def test_an_unknown_name_of_megabytes_is_compared_and_shown_in_part() -> None:
    name = "".join(chr(0x4E00 + number % 20_000) for number in range(1_000_000))
    assert peak_bytes(lambda: unknown_field(name, ["prompt", "messages"])) < 1 << 20
    assert len(str(unknown_field(name, ["prompt", "messages"]))) < 300


def test_quotes_that_are_never_closed_hold_one_record_in_memory_not_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(csvfile, "LINE_LIMIT", 10_000)

    def read(rows: int) -> None:
        text = io.StringIO('prompt\n"' + "a line within quotes\n" * rows)
        records = list(read_csv(text, "in.csv"))
        assert {type(record) for _, record in records} <= {RowError, dict}
        assert any(
            isinstance(record, RowError) and "close their quotes" in record.message for _, record in records
        )

    def peak(rows: int) -> int:
        text = io.StringIO("prompt\n" + '"\n",' * rows)  # one record of ever so many cells

        def cells() -> None:
            for _ in read_csv(text, "in.csv"):
                pass

        return peak_bytes(cells)

    read(2_000)
    assert peak(40_000) < 2 * peak(4_000)


def test_a_fence_that_is_not_closed_is_read_in_one_pass() -> None:
    text = "```json" + " " * 20_000 + "x y" + " " * 20_000 + "z``"  # took minutes from 2,000 blanks on
    calls = Calls(CallFormat.JSON, Tools([{"type": "function", "function": {"name": "f"}}]))
    assert [*calls.push(text), *calls.end()] == [text]
    calls = Calls(CallFormat.JSON, Tools([{"type": "function", "function": {"name": "f"}}]))
    fenced = '```json\n{"name": "f", "arguments": {}}\n```\n'
    assert [*calls.push(fenced), *calls.end()] == [("f", "{}")]


def test_a_prompt_of_token_ids_asks_no_protocol_for_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        def __instancecheck__(self, value: object) -> bool:
            raise AssertionError("a protocol was asked, which takes microseconds for each id")

    monkeypatch.setattr(prompts, "SupportsIndex", Asked())
    assert prompts.check_token_ids([1, 2, 3]) == [1, 2, 3]
    for other in ("7", True, 1.0, [7], {}):
        with pytest.raises(InvalidRequestError, match=r"prompt\[1\]"):
            prompts.check_token_ids([1, other])
