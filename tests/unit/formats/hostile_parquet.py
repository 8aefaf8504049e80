"""Parquet files of some hundred bytes that say they are gigabytes, and files that are broken."""

import io
import random
from collections.abc import Callable, Iterator
from functools import partial
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


def hostile() -> dict[str, Callable[[], bytes]]:
    """What makes the bytes of a file, by what it is; each is to be refused as a whole.

    Statistics of the longest texts are left out: to make them took most of the time.
    """
    plain = partial(pyarrow.table, {"prompt": ["a" * 40 * MEBI]})
    several = written(pyarrow.table({"prompt": ["a"] * 1000, "metadata": ["{}"] * 1000}), compression="none")
    return {
        "a text of 10 MiB in 256 rows": lambda: repeated(10 * MEBI, 256),
        "a text of 10 MiB in 256 rows, whose schema has a dictionary": (
            lambda: repeated(10 * MEBI, 256, store_schema=True)
        ),
        "a text of 64 MiB in 64 rows": partial(repeated, 64 * MEBI, 64, write_statistics=False),
        "a text of 300 MiB": partial(repeated, 300 * MEBI, 1, write_statistics=False),
        "a text of 3 MiB in 99,999 rows": lambda: repeated(3 * MEBI, 99_999),
        "a million rows that are null": (
            lambda: written(pyarrow.table({"prompt": pyarrow.nulls(MEBI, pyarrow.string())}))
        ),
        "two million rows of one text": lambda: repeated(4, 2_000_000),
        **{
            f"a page of 40 MiB, {codec}": partial(_page, plain, codec)
            for codec in ("snappy", "brotli", "zstd")
        },
        "a chat of 160 MiB": _long_chat,
        "a chat of 4 million empty messages": _empty_messages,
        "control characters, which JSON escapes": (
            lambda: written(pyarrow.table({"prompt": ["\x01" * 8 * MEBI] * 2}))
        ),
        **{f"cut at {part:.0%}": partial(cut, several, part) for part in (0.1, 0.5, 0.99)},
        "two fields of one name": _two_fields_of_one_name,
    }


def _page(table: Callable[[], Any], codec: str) -> bytes:
    return written(table(), compression=codec, use_dictionary=False)


def _long_chat() -> bytes:
    chat = [{"role": "user", "content": "a" * 8 * MEBI}] * 20
    return written(pyarrow.table({"messages": [chat]}))


def _empty_messages() -> bytes:
    empty: list[Any] = [[{"role": None, "content": None}] * 4_000_000]
    kind = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
    return written(pyarrow.table({"messages": pyarrow.array(empty, kind)}))


def _two_fields_of_one_name() -> bytes:
    twice = pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["x", "x"])
    return written(pyarrow.table({"prompt": pyarrow.array(["a"]), "metadata": twice}))


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
