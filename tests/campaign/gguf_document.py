"""A GGUF file as a document that may be made wrong in any part; read and written without Nightmill."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRING, ARRAY = 8, 9
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass
class Items:
    """An array; `count` lies about its length where it is given."""

    kind: int
    values: list[Any]
    count: int | None = None


@dataclass
class Entry:
    """A key with its value. `raw`: bytes to write in place of the value."""

    key: bytes
    kind: int
    value: Any
    raw: bytes | None = None


@dataclass
class Tensor:
    """As the header has it, dimensions fastest first."""

    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Document:
    """A whole file. Counts that are None are the true ones."""

    entries: list[Entry]
    tensors: list[Tensor]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    entry_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32

    def entry(self, key: bytes) -> Entry | None:
        """The first of this key."""
        return next((entry for entry in self.entries if entry.key == key), None)

    def header(self) -> bytes:
        """All before the tensors' data, without padding."""
        parts = [self.magic, _u32(self.version)]
        parts.append(_u64(len(self.tensors) if self.tensor_count is None else self.tensor_count))
        parts.append(_u64(len(self.entries) if self.entry_count is None else self.entry_count))
        for entry in self.entries:
            value = _value(entry.kind, entry.value) if entry.raw is None else entry.raw
            parts += [_string(entry.key), _u32(entry.kind), value]
        for tensor in self.tensors:
            parts += [_string(tensor.name), _u32(len(tensor.dims)), *map(_u64, tensor.dims)]
            parts += [_u32(tensor.kind), _u64(tensor.offset)]
        return b"".join(parts)

    def encode(self) -> bytes:
        """The file."""
        header = self.header()
        return header + b"\0" * (-len(header) % self.alignment) + self.data


def read(path: Path) -> Document:
    """Parse a sound file."""
    data = path.read_bytes()
    place = 0

    def take(layout: str) -> Any:
        nonlocal place
        value = struct.unpack_from("<" + layout, data, place)[0]
        place += struct.calcsize("<" + layout)
        return value

    def text() -> bytes:
        nonlocal place
        length = take("Q")
        place += length
        return data[place - length : place]

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        if kind != ARRAY:
            return take(FORMATS[kind])
        item, count = take("I"), take("Q")
        return Items(item, [value(item) for _ in range(count)])

    assert take("4s") == b"GGUF"
    version, tensor_count, entry_count = take("I"), take("Q"), take("Q")
    entries = []
    for _ in range(entry_count):
        key, kind = text(), take("I")
        entries.append(Entry(key, kind, value(kind)))
    tensors = []
    for _ in range(tensor_count):
        name = text()
        dims = [take("Q") for _ in range(take("I"))]
        tensors.append(Tensor(name, dims, take("I"), take("Q")))
    return Document(entries, tensors, data[place + (-place % 32) :], version=version)


def _u32(number: int) -> bytes:
    return struct.pack("<I", number % 2**32)


def _u64(number: int) -> bytes:
    return struct.pack("<Q", number % 2**64)


def _string(text: bytes) -> bytes:
    return _u64(len(text)) + text


def _value(kind: int, value: Any) -> bytes:
    """Written as its kind says, as far as that is possible: a mutant's value may be of another."""
    if isinstance(value, Items):
        count = len(value.values) if value.count is None else value.count
        return _u32(value.kind) + _u64(count) + b"".join(_value(value.kind, item) for item in value.values)
    if isinstance(value, bytes):
        return _string(value)
    layout = "<" + FORMATS.get(kind, "Q")
    try:
        return struct.pack(layout, value)
    except (struct.error, OverflowError):
        bits = int(value) % 2 ** (8 * struct.calcsize(layout)) if abs(float(value)) < 1e300 else 0
        return bits.to_bytes(struct.calcsize(layout), "little")
