"""Which files of a repository a name means: as llama.cpp chooses, so that the same name is the same model."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from nightmill.jobs.errors import ModelFetchError
from nightmill.worker.model.hub.names import HubName

_USUAL: Final = (
    re.compile(r"(?<![A-Za-z0-9])Q4_K_M(?![A-Za-z0-9_])", re.I),
    re.compile(r"(?<![A-Za-z0-9])Q4_", re.I),
)
_NO_MODELS: Final = ("mmproj", "imatrix")  # a vision tower; statistics for quantising
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.I)
_LABEL = re.compile(r"(?:UD-)?I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*", re.I)
_MOST_NAMED = 30


def choose(name: HubName, files: Sequence[str]) -> tuple[str, ...]:
    """The file that `name` means among the `files` of its repository; all parts of a split one, in order.

    Raises ModelFetchError, which names what there is, if it is not there.
    """
    models = [file for file in files if is_model(file)]
    if name.file is not None:
        if name.file not in files:
            raise ModelFetchError(f"{name.repo} has no file {name.file}; {_there(models)}")
        return parts_of(name.file, files)
    if not models:
        raise ModelFetchError(
            f"{name.repo} has no GGUF file; look for a repository of the same model that has"
        )
    if name.quant is None:
        patterns: tuple[re.Pattern[str], ...] = (*_USUAL, re.compile(""))
    else:
        patterns = (re.compile(rf"(?<![A-Za-z0-9]){re.escape(name.quant)}(?![A-Za-z0-9_])", re.I),)
    for pattern in patterns:
        for file in models:
            if pattern.search(file):
                return parts_of(file, files)
    raise ModelFetchError(f"{name.repo} has no {name.quant}; {_there(models, quants=True)}")


def is_model(file: str) -> bool:
    """Return whether a file of a repository is a model, or the first part of one."""
    base = file.rpartition("/")[2].lower()
    part = _PART.fullmatch(base)
    first = part is None or int(part["part"]) == 1
    return base.endswith(".gguf") and first and not any(word in base for word in _NO_MODELS)


def parts_of(file: str, files: Iterable[str]) -> tuple[str, ...]:
    """All parts of the split model that `file` is a part of, in order; only `file` if it is not split."""
    match = _PART.fullmatch(file)
    if match is None:
        return (file,)
    count = int(match["parts"])
    parts = tuple(f"{match['stem']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1))
    there = set(files)
    if missing := [part for part in parts if part not in there]:
        raise ModelFetchError(
            f"{file} is one of {count} parts of a model, of which {len(missing)} are missing: {missing[0]}"
        )
    return parts


def quant_of(file: str) -> str | None:
    """The quantisation that a file's name ends with; None if it names none."""
    found = _LABEL.findall(re.sub(r"-\d{5}-of-\d{5}", "", file.rpartition("/")[2]).removesuffix(".gguf"))
    return found[-1].upper() if found else None


def _there(models: Sequence[str], *, quants: bool = False) -> str:
    if not models:
        return "it has no GGUF file at all"
    found = list(dict.fromkeys((quant_of(file) if quants else None) or file for file in models))
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"there {'is' if len(found) == 1 else 'are'} {', '.join(found[:_MOST_NAMED])}{more}"
