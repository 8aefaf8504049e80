"""Lines of JSON from arbitrary bytes: each line is an object or an error of its own."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError, RowCode
from nightmill.jobs.formats.rows import RowError
from nightmill.jobs.request.prompts import json_type

LINE_LIMIT = 16 * 2**20
"""Largest row in bytes. A prompt of this size has millions of tokens; more is a broken file."""
MOST_CONTAINERS = 1 << 18
"""Most lists and objects in one JSON text, counted by brackets, including those within strings.

Each takes 56 to 230 bytes of memory, so 16 MiB of empty ones would take 400 MiB.
"""
_BOM = b"\xef\xbb\xbf"
_LONGEST_KEY = 100  # characters that a message shows; a key may have megabytes


def read_objects(stream: BinaryIO, limit: int = LINE_LIMIT) -> Iterator[tuple[int, JsonObject | RowError]]:
    """Yield (1-based line number, object or error) without empty lines, with one line in memory at a time."""
    for number, line in _lines(stream, limit):
        try:
            yield number, parse_object(line, limit)
        except InvalidRequestError as error:
            yield number, RowError.of(error)


def _lines(stream: BinaryIO, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not empty; an overlong one is cut slightly past `limit` bytes."""
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


def parse_object(line: bytes | bytearray, limit: int = LINE_LIMIT) -> JsonObject:
    """Parse the object in a line; raises InvalidRequestError."""
    if len(line) > limit:
        said = f"the line has more than {limit} bytes; shorten or divide its prompt"
        raise InvalidRequestError(said, code=RowCode.TOO_LONG)
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} of the line (0x{line[error.start]:02X})"
        said = f"{found} is not UTF-8; save the file as UTF-8"
        raise InvalidRequestError(said, code=RowCode.INVALID_ENCODING) from None
    value = parse_value(text)
    if not isinstance(value, dict):
        raise _not_json(f"is {json_type(value)}; write one JSON object, {{...}}, on each line")
    return value


def parse_value(text: str) -> Any:
    """Parse a JSON text more strictly than `json.loads`. Raises InvalidRequestError."""
    if len(text) > MOST_CONTAINERS and text.count("{") + text.count("[") > MOST_CONTAINERS:
        said = f"holds more than {MOST_CONTAINERS:,} brackets and braces; divide it"
        raise InvalidRequestError(said, code=RowCode.TOO_LONG)
    try:
        return _DECODER.decode(text)
    except InvalidRequestError:  # which is a ValueError, too
        raise
    except json.JSONDecodeError as error:
        place = f"{error.msg} at character {error.pos + 1}"
        raise _not_json(f"is not JSON: {place}; write one JSON object on each line") from None
    except ValueError:  # raised only for whole numbers of thousands of digits
        raise _not_json("holds a number with too many digits; shorten it, or make it a text") from None
    except RecursionError:
        raise _not_json("is nested too deeply; flatten it") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                shown = name if len(name) <= _LONGEST_KEY else f"{name[:_LONGEST_KEY]}..."
                raise _not_json(f"the key {shown!r} is there twice in one object; keep one of them")
            seen.add(name)
    return made


def _no_constant(name: str) -> Any:
    raise _not_json(f"{name} is not JSON; give a finite number or null")


def _not_json(said: str) -> InvalidRequestError:
    return InvalidRequestError(said, code=RowCode.INVALID_JSON)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)
