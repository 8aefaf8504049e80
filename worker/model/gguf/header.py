"""Walks the header of a GGUF file and believes nothing, so that what comes after may believe all of it.

The readers in circulation trust lengths and counts from the file: a damaged download makes them allocate
gigabytes or fail with a foreign error. Here every length, count, type, shape and offset is checked against
the size of the file before it is used, and nothing larger than the header's own index is allocated: values
and tensors are only located. The layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from dataclasses import dataclass, field
from math import prod
from typing import Final, NoReturn

from gguf import GGMLQuantizationType, GGUFValueType
from gguf.constants import GGML_QUANT_SIZES

from nightmill.jobs.errors import ModelFileError

MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 20
MAX_ITEMS: Final = 1 << 24  # of one array; the largest vocabularies have 2**18 tokens
MAX_NAME: Final = 1 << 16  # bytes of a key or tensor name
MAX_ELEMENTS: Final = 1 << 62

SCALAR_FORMATS: Final = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "B",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_OTHER_FORMATS = (
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (b"PK\x03\x04", "a ZIP archive (PyTorch checkpoints are); convert the model to GGUF first"),
    (b"\x1f\x8b", "gzip-compressed; decompress it first"),
    (b"<", "a web page or XML, probably an error page saved by a download; download it again"),
    (b"tjgg", "an old llama.cpp format (GGJT); convert the model to GGUF first"),
    (b"fmgg", "an old llama.cpp format (GGMF); convert the model to GGUF first"),
    (b"lmgg", "an old llama.cpp format (GGML); convert the model to GGUF first"),
)

_NEWER_TYPES: Final = {40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}
"""Types of tensors that llama.cpp has and not every `gguf` package, by their numbers."""


@dataclass(frozen=True, slots=True)
class Value:
    """Type and offset of a metadata value; `item` and `count` describe an array's items from `offset` on."""

    kind: GGUFValueType
    offset: int
    item: GGUFValueType | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the file declares it. `shape` is row-major; `offset` counts bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    nbytes: int
    offset: int


@dataclass(slots=True)
class Header:
    """The contents of a file's header: values by key, tensors by name, both in the order of the file."""

    version: int
    values: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


class HeaderWalk:
    """One pass over the header of a mapped file; every fault is a ModelFileError that starts with `label`."""

    def __init__(self, data: memoryview, label: str) -> None:
        self._data = data
        self._size = len(data)
        self._label = label
        self._at = 0

    def read(self) -> Header:
        """Read and check the whole header."""
        header = Header(self._version())
        tensor_count = self._u64("the tensor count")
        key_count = self._u64("the key count")
        # A key takes at least 14 bytes (8 + 1 name, 4 type, 1 value), a tensor 33; so counts that the file
        # could not hold are refused before they are looped over.
        left = self._size - self._at
        if key_count > min(MAX_KEYS, left // 14):
            self._fail(f"claims {key_count} metadata keys, more than its {self._size} bytes can hold")
        if tensor_count > min(MAX_TENSORS, left // 33):
            self._fail(f"claims {tensor_count} tensors, more than its {self._size} bytes can hold")
        for index in range(key_count):
            key = self._name(f"metadata key {index}")
            if key in header.values:
                self._fail(f"{key}: the key occurs twice")
            header.values[key] = self._value(key)
        alignment = self._alignment(header)
        declared = [self._tensor(index) for index in range(tensor_count)]
        start = -(-self._at // alignment) * alignment
        for info in declared:
            if info.name in header.tensors:
                self._fail(f"tensor {info.name}: the name occurs twice")
            header.tensors[info.name] = self._placed(info, start, alignment)
        self._refuse_overlap(header)
        return header

    def _version(self) -> int:
        head = bytes(self._data[:64])
        if not head:
            self._fail("is empty; the download may have failed")
        if head[:4] != b"GGUF":
            self._fail(f"is not a GGUF file: {_what_is(head)}")
        self._at = 4
        version = self._u32("the version")
        if version & 0xFFFF == 0 and version:
            self._fail(
                "is a big-endian GGUF file; turn it around in place with `gguf-convert-endian FILE little`, "
                "or use another download"
            )
        if version == 1:
            self._fail("is GGUF version 1, which is no longer read; convert the model again")
        if version not in (2, 3):
            self._fail(f"is GGUF version {version}; versions 2 and 3 are supported")
        return version

    def _value(self, key: str) -> Value:
        kind = self._value_type(key)
        if kind is not GGUFValueType.ARRAY:
            value = Value(kind, self._at)
            self._skip_items(kind, 1, key)
            return value
        item = self._value_type(key)
        if item is GGUFValueType.ARRAY:  # llama.cpp refuses them, too
            self._fail(f"{key}: is an array of arrays, which no supported model has")
        count = self._u64(f"{key}: the array's length")
        value = Value(kind, self._at, item, count)
        self._skip_items(item, count, key)
        return value

    def _value_type(self, key: str) -> GGUFValueType:
        number = self._u32(f"{key}: the value type")
        try:
            return GGUFValueType(number)
        except ValueError:
            return self._fail(f"{key}: unknown value type {number}; the file is damaged here or before")

    def _skip_items(self, item: GGUFValueType, count: int, key: str) -> None:
        scalar = SCALAR_FORMATS.get(item)
        smallest = struct.calcsize(f"<{scalar}") if scalar else 8
        if count > MAX_ITEMS or count * smallest > self._size - self._at:
            self._fail(f"{key}: claims {count} items, which do not fit in the file (truncated or damaged)")
        if scalar:
            self._at += count * smallest
        else:
            self._skip_strings(count, key)

    def _skip_strings(self, count: int, key: str) -> None:
        # Vocabularies have some 300,000 strings: a tight loop over locals, 0.1 s instead of 0.4.
        data, at, last = self._data, self._at, self._size - 8
        for index in range(count):
            if at > last:
                self._fail(f"{key}: string {index} of {count} lies past the end of the file (truncated?)")
            at += 8 + _U64.unpack_from(data, at)[0]
        if at > self._size:
            self._fail(f"{key}: a string's length passes the end of the file (truncated or damaged)")
        self._at = at

    def _alignment(self, header: Header) -> int:
        value = header.values.get("general.alignment")
        if value is None:
            return 32  # the format's default
        if value.kind is not GGUFValueType.UINT32:
            self._fail(f"general.alignment: is {value.kind.name}, expected UINT32")
        alignment = int(_U32.unpack_from(self._data, value.offset)[0])
        if alignment == 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            self._fail(f"general.alignment: {alignment} is not a power of two up to 2**20")
        return alignment

    def _tensor(self, index: int) -> TensorInfo:
        name = self._name(f"tensor {index}")
        dimensions = self._u32(f"tensor {name}: the number of dimensions")
        if not 1 <= dimensions <= 4:
            self._fail(f"tensor {name}: has {dimensions} dimensions, expected 1 to 4")
        shape = tuple(self._u64(f"tensor {name}: its shape") for _ in range(dimensions))[::-1]
        if not all(shape):
            self._fail(f"tensor {name}: has a dimension of 0 in its shape {shape}")
        if prod(shape) > MAX_ELEMENTS:
            self._fail(f"tensor {name}: its shape {shape} is impossibly large")
        number = self._u32(f"tensor {name}: its type")
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            if number in _NEWER_TYPES:
                self._fail(
                    f"tensor {name}: the type {_NEWER_TYPES[number]} is not supported; requantise the model"
                )
            self._fail(f"tensor {name}: unknown tensor type {number}; a newer `gguf` package may know it")
        if shape[-1] % block:
            self._fail(
                f"tensor {name}: rows of {shape[-1]} are not a multiple of {kind.name}'s block of {block}"
            )
        offset = self._u64(f"tensor {name}: its offset")
        return TensorInfo(name, shape, kind, prod(shape) // block * block_bytes, offset)

    def _placed(self, info: TensorInfo, start: int, alignment: int) -> TensorInfo:
        if info.offset % alignment:
            self._fail(f"tensor {info.name}: offset {info.offset} is not aligned to {alignment} bytes")
        offset = start + info.offset
        if offset + info.nbytes > self._size:
            missing = offset + info.nbytes - self._size
            self._fail(
                f"tensor {info.name}: its data ends {missing} bytes past the end of the file; "
                "the download may be incomplete"
            )
        return TensorInfo(info.name, info.shape, info.kind, info.nbytes, offset)

    def _refuse_overlap(self, header: Header) -> None:
        end, before = 0, ""
        for info in sorted(header.tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                self._fail(f"tensor {info.name}: its data overlaps that of tensor {before}")
            end, before = info.offset + info.nbytes, info.name

    def _name(self, what: str) -> str:
        length = self._u64(f"{what}: its name's length")
        if not 0 < length <= MAX_NAME or length > self._size - self._at:
            self._fail(f"{what}: its name has an impossible length of {length} bytes")
        raw = bytes(self._data[self._at : self._at + length])
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return self._fail(f"{what}: its name is not UTF-8; the file is damaged here or before")

    def _u32(self, what: str) -> int:
        return self._integer(_U32, what)

    def _u64(self, what: str) -> int:
        return self._integer(_U64, what)

    def _integer(self, layout: struct.Struct, what: str) -> int:
        if self._at + layout.size > self._size:
            self._fail(f"ends before {what}; the download may be incomplete")
        number = int(layout.unpack_from(self._data, self._at)[0])
        self._at += layout.size
        return number

    def _fail(self, fault: str) -> NoReturn:
        raise ModelFileError(f"{self._label}: {fault}")


def _what_is(head: bytes) -> str:
    """Guess what a file that is not a GGUF file is, with what to do about it."""
    for magic, description in _OTHER_FORMATS:
        if head.lstrip().startswith(magic) or head.startswith(magic):
            return f"it is {description}"
    if len(head) > 8 and head[8:9] == b"{":
        return "it looks like safetensors; convert the model to GGUF first"
    return f"it starts with {head[:4]!r}"
