"""The kernel files, and what nvcc is told about a model when it compiles them."""

from collections.abc import Iterable
from pathlib import Path

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.compiler import kernel_directory

__all__ = ["TENSOR_CORE_HEADS", "Source", "instances", "source_of"]

TENSOR_CORE_HEADS = (64, 128)  # head sizes that fast attention and fused QKV are compiled for

Source = tuple[Path, tuple[str, ...]]
"""A file, and options for nvcc."""

_ROTATED = {"few_rows", "hopper_qkv", "qkv_rope"}
_BY_HEAD = _ROTATED | {
    "attention_any", "decode_attention", "hopper_attention", "prefill_attention", "split_attention",
}  # fmt: skip


def source_of(name: str, spec: ModelSpec | None = None) -> Source:
    """The file of that name in `cuda/`; `spec` where it is compiled for a model's heads."""
    options: tuple[str, ...] = ()
    if spec is not None and name in _BY_HEAD:
        options += (f"-DHEAD_DIM={spec.layers[0].attention.head_dim}",)
    if spec is not None and name in _ROTATED:
        style = spec.layers[0].attention.rope.style
        options += (f"-DINTERLEAVED={int(style is RopeStyle.PAIRS)}",)
    return kernel_directory() / f"{name}.cu", options


def instances(macro: str, arguments: Iterable[Iterable[object]]) -> str:
    """The option with which a file has a kernel for each of these arguments of a template."""
    calls = "".join(f"{macro}({','.join(map(str, one))})" for one in arguments)
    return "-DKERNELS=" + calls.replace(",", "\\,")  # nvcc takes a plain comma for the end of a definition
