"""The kernel files, and what nvcc is told about a model when it compiles them."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.device.compiler import included_files, kernel_directory
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.kv_format import KvFormat

__all__ = [
    "Source", "by_head", "for_element", "instances", "members", "rotated", "source_of",
]  # fmt: skip

Source = tuple[Path, tuple[str, ...]]
"""A file, and options for nvcc."""


def source_of(name: str, *options: str) -> Source:
    """The kernel file of that name in `cuda/` or a folder of it, with options for nvcc."""
    return _kernel_file(kernel_directory(), name), options


@cache
def _kernel_file(directory: Path, name: str) -> Path:
    (path,) = directory.rglob(f"{name}.cu")
    return path


def for_element(source: Source, element: Element, kv: KvFormat = KvFormat.ELEMENT) -> Source:
    """The source with the options for that element and that KV cache, if it includes what knows them.

    Those are `element.cuh` and `kv_cache.cuh`; other files are compiled once for any.
    """
    path, options = source
    common = (kernel_directory() / "common").resolve()
    if element.options or kv is KvFormat.FP8:
        included = included_files(path)
        if common / "element.cuh" in included:
            options = (*options, *element.options)
        if kv is KvFormat.FP8 and common / "kv_cache.cuh" in included:
            options = (*options, "-DKV_FP8")
    return path, options


def by_head(attention: Attention) -> tuple[str, ...]:
    """Options of files that are compiled for a head size."""
    return (f"-DHEAD_DIM={attention.head_dim}",)


def rotated(attention: Attention) -> tuple[str, ...]:
    """Options of files that rotate heads."""
    return (*by_head(attention), f"-DINTERLEAVED={int(attention.rope.style is RopeStyle.PAIRS)}")


def instances(macro: str, arguments: Iterable[Iterable[object]]) -> str:
    """The option with which a file has a kernel for each of these arguments of a template."""
    calls = "".join(f"{macro}({','.join(map(str, one))})" for one in arguments)
    return "-DKERNELS=" + calls.replace(",", "\\,")  # nvcc takes a plain comma for the end of a definition


def members(macro: str, record: np.dtype[Any]) -> str:
    """The option with which a file has the members of a struct laid out as `record`, an aligned dtype."""
    if not record.isalignedstruct or record.fields is None:
        raise ValueError(f"{macro}: {record} is not laid out as a struct of C")
    names = {"<i4": "int", "<f4": "float", "<u8": "unsigned long long"}
    declared = (f"{names[kind.str]} {name};" for name, (kind, *_) in record.fields.items())
    return f"-D{macro}={' '.join(declared)}"
