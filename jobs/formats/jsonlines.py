"""Lines of JSON from bytes, whatever the bytes are: each line is an object or an error of its own."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.formats.messages import json_type
from nightmill.jobs.formats.rows import RowCode, RowError, RowRefusedError

LINE_LIMIT = 16 * 2**20
"""Bytes that a row may have. A prompt of this size has millions of tokens; more is a broken file."""
_BOM = b"\xef\xbb\xbf"


def read_objects(stream: BinaryIO, limit: int = LINE_LIMIT) -> Iterator[tuple[int, JsonObject | RowError]]:
    """(1-based line number, what it holds), without the empty lines; holds one line at a time."""
    for number, line in _lines(stream, limit):
        try:
            yield number, parse_object(line, limit)
        except RowRefusedError as refused:
            yield number, refused.error


def _lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes]]:
    """Lines with something in them; of one that is too long, the first `limit` bytes and a few."""
    number = 0
    while line := stream.readline(limit + 2):
        number += 1
        rest = line
        while len(rest) >= limit + 2 and not rest.endswith(b"\n"):
            rest = stream.readline(limit + 2)
        if number == 1:
            line = line.removeprefix(_BOM)
        if line := line.strip(b" \t\r\n"):
            yield number, line


def parse_object(line: bytes, limit: int = LINE_LIMIT) -> JsonObject:
    """The object that a line holds; raises RowRefusedError."""
    if len(line) > limit:
        raise RowRefusedError(
            RowCode.TOO_LONG, f"the line has more than {limit} bytes; shorten or divide its prompt"
        )
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} of the line (0x{line[error.start]:02X})"
        raise RowRefusedError(
            RowCode.INVALID_ENCODING, f"{found} is not UTF-8; save the file as UTF-8"
        ) from None
    value = parse_value(text)
    if not isinstance(value, dict):
        raise RowRefusedError(
            RowCode.INVALID_JSON, f"is {json_type(value)}; write one JSON object, {{...}}, on each line"
        )
    return value


def parse_value(text: str) -> Any:
    """The value that a JSON text stands for; stricter than `json.loads`. Raises RowRefusedError."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RowRefusedError(
            RowCode.INVALID_JSON,
            f"is not JSON: {error.msg} at character {error.pos + 1}; write one JSON object on each line",
        ) from None
    except ValueError:  # of all values, only whole numbers of thousands of digits do this
        raise RowRefusedError(
            RowCode.INVALID_JSON, "holds a number with too many digits; shorten it, or make it a text"
        ) from None
    except RecursionError:
        raise RowRefusedError(RowCode.INVALID_JSON, "is nested too deeply; flatten it") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in made if names.count(name) > 1)
        raise RowRefusedError(
            RowCode.INVALID_JSON, f"the key {twice!r} is there twice in one object; keep one of them"
        )
    return made


def _no_constant(name: str) -> Any:
    raise RowRefusedError(RowCode.INVALID_JSON, f"{name} is not JSON; give a finite number or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)
