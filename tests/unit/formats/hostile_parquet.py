"""Parquet files of some hundred bytes that say they are gigabytes, and files that are broken."""

import io
import random
from collections.abc import Iterator
from typing import Any

import pyarrow
from pyarrow import parquet

MEBI = 1 << 20


def written(table: Any, **options: Any) -> bytes:
    """A table as a Parquet file with as much in one page as can be."""
    sink = io.BytesIO()
    chosen = {
        "compression": "zstd",
        "data_page_size": 1 << 30,
        "dictionary_pagesize_limit": 1 << 30,
        "store_schema": False,
    } | options
    parquet.write_table(table, sink, **chosen)
    return sink.getvalue()


def repeated(length: int, rows: int, **options: Any) -> bytes:
    """One text in so many rows, through a dictionary that has it once."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["a" * length])
    return written(pyarrow.table({"prompt": texts}), **options)


def hostile() -> Iterator[tuple[str, bytes]]:
    """(what it is, its bytes); each is to be refused as a whole."""
    yield "a text of 10 MiB in 256 rows", repeated(10 * MEBI, 256)
    yield (
        "a text of 10 MiB in 256 rows, whose schema has a dictionary",
        repeated(10 * MEBI, 256, store_schema=True),
    )
    yield "a text of 64 MiB in 64 rows", repeated(64 * MEBI, 64)
    yield "a text of 300 MiB", repeated(300 * MEBI, 1)
    yield "a text of 3 MiB in 99,999 rows", repeated(3 * MEBI, 99_999)
    yield (
        "a million rows that are null",
        written(pyarrow.table({"prompt": pyarrow.nulls(MEBI, pyarrow.string())})),
    )
    yield "two million rows of one text", repeated(4, 2_000_000)
    plain = pyarrow.table({"prompt": ["a" * 40 * MEBI]})
    for codec in ("snappy", "brotli", "zstd"):
        yield f"a page of 40 MiB, {codec}", written(plain, compression=codec, use_dictionary=False)
    chat = [{"role": "user", "content": "a" * 8 * MEBI}] * 20
    yield "a chat of 160 MiB", written(pyarrow.table({"messages": [chat] * 4}))
    empty: list[Any] = [[{"role": None, "content": None}] * 4_000_000]
    kind = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    yield (
        "a chat of 4 million empty messages",
        written(pyarrow.table({"messages": pyarrow.array(empty, kind)})),
    )
    controls = written(pyarrow.table({"prompt": ["\x01" * 8 * MEBI] * 2}))
    yield "control characters, which JSON escapes", controls
    several = pyarrow.table({"prompt": ["a"] * 1000, "metadata": ["{}"] * 1000})
    good = written(several, compression="none")
    for part in (0.1, 0.5, 0.99):
        yield f"cut at {part:.0%}", cut(good, part)
    yield "two fields of one name", written(
        pyarrow.table({"prompt": ["a"], "metadata": pyarrow.StructArray.from_arrays(
            [pyarrow.array([1]), pyarrow.array([2])], ["x", "x"])})
    )  # fmt: skip


def cut(content: bytes, share: float) -> bytes:
    """The first part of a file, with the end that every Parquet file has."""
    return content[: int(len(content) * share)] + content[-8:]


def mutated(count: int, seed: int = 7) -> Iterator[bytes]:
    """Files with some bytes changed, most of them in the footer, where the structure is."""
    draw = random.Random(seed)
    good = written(
        pyarrow.table(
            {
                "prompt": [f"Once {number % 7}" for number in range(300)],
                "stop": [["a", "b"]] * 300,
                "metadata": [{"k": number} for number in range(300)],
            }
        )
    )
    footer = int.from_bytes(good[-8:-4], "little")
    for _ in range(count):
        content = bytearray(good)
        for _ in range(draw.choice((1, 2, 8))):
            beginning = len(good) - 8 - footer if draw.random() < 0.7 else 4
            content[draw.randrange(beginning, len(good))] = draw.randrange(256)
        yield bytes(content)
