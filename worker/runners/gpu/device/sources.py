"""The kernel files, and what nvcc is told about a model when it compiles them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.device.compiler import included_files, kernel_directory
from nightmill.worker.runners.gpu.device.element import Element

__all__ = [
    "Source", "by_head", "for_element", "instances", "members", "rotated", "source_of",
]  # fmt: skip

Source = tuple[Path, tuple[str, ...]]
"""A file, and options for nvcc."""


def source_of(name: str, *options: str) -> Source:
    """The file of that name in a folder of `cuda/`."""
    (path,) = kernel_directory().glob(f"*/{name}.cu")
    return path, options


def for_element(source: Source, element: Element) -> Source:
    """The source with the option for that element, if it includes `element.cuh`; others are for any."""
    path, options = source
    header = kernel_directory() / "common" / "element.cuh"
    if element.options and header.resolve() in included_files(path):
        return path, (*options, *element.options)
    return source


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
