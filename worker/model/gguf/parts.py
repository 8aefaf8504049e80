"""Names of the parts of a split model: `NAME-00001-of-00003.gguf` and so on, as in llama.cpp."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAX_PARTS: Final = 256  # each is an open file; the largest models on the Hub have some 50

_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})", re.DOTALL)


def part_paths(path: Path, count: int) -> list[Path] | None:
    """Return the paths of all parts of the model whose first part is `path`.

    None if the name of `path` does not say so.
    """
    paths = _all_parts(path, 1, count)
    return list(paths) if paths is not None else None


def first_part(path: Path, number: int, count: int) -> Path | None:
    """Return the path of the first part of the model whose part `number`, from 1, is `path`.

    None if the name of `path` does not say so.
    """
    paths = _all_parts(path, number, count)
    return next(paths) if paths is not None else None


def _all_parts(path: Path, number: int, count: int) -> Iterator[Path] | None:
    match = _PART.fullmatch(path.stem)
    if match is None or (int(match["part"]), int(match["parts"])) != (number, count):
        return None
    stem, suffix = match["stem"], path.suffix
    return (path.with_name(f"{stem}-{part:05}-of-{count:05}{suffix}") for part in range(1, count + 1))


def whole_name(stem: str) -> str:
    """Return the name of the model whose part, or only file, has the name `stem`, without its ending."""
    match = _PART.fullmatch(stem)
    return stem if match is None else match["stem"]
