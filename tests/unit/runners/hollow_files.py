"""Model files without weights, for runners on a recorded driver: sizes are real, nothing is read."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.gguf.header import TensorInfo
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu import loading, runner
from nightmill.worker.runners.gpu.products.fp8.rounding import Rounder
from nightmill.worker.runners.gpu.weights.dequantizer import Dequantizer
from nightmill.worker.runners.gpu.weights.repacker import Repacker

__all__ = ["hollow_file", "read_nothing", "typed"]


class _HollowFile:
    def __init__(self, spec: ModelSpec) -> None:
        self.path = Path("hollow.gguf")
        self.tensors = {info.name: info for info in _tensors(spec)}

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return np.zeros(0, dtype=np.uint8)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A matrix of a router, or what a self-test would read."""
        return np.zeros(self.tensors[name].shape, dtype=np.float32)

    def digest(self) -> str:
        return "0" * 64


def _tensors(spec: ModelSpec) -> Iterator[TensorInfo]:
    for _, weight in spec.all_weights():
        for name, shape in weight.parts:
            kind = GGMLQuantizationType[spec.tensor_types.get(name, "F32")]
            count, size = GGML_QUANT_SIZES[kind]
            yield TensorInfo(name, tuple(shape), kind, math.prod(shape) // count * size, 0)


def hollow_file(spec: ModelSpec) -> GgufFile:
    """A file that has the tensors of a spec, of its types."""
    return cast(GgufFile, _HollowFile(spec))


def typed(spec: ModelSpec) -> ModelSpec:
    """The spec with a layer of each kind, and matrices in Q4_K, or what their rows are whole blocks of."""
    thin = replace(spec, layers=tuple(dict.fromkeys(spec.layers)))
    types = {
        name: _type_of(shape[-1]) if weight.is_matrix else "F32"
        for _, weight in thin.all_weights()
        for name, shape in weight.parts
    }
    return replace(thin, tensor_types=types)


def _type_of(columns: int) -> str:
    return "F16" if columns % 32 else "Q8_0" if columns % 256 else "Q4_K"


def read_nothing(patch: pytest.MonkeyPatch) -> None:
    """Runners place weights and leave them empty, and do not test themselves."""

    def nothing(*arguments: Any, **options: Any) -> None:
        pass

    for kind, names in ((Dequantizer, ["load"]), (Repacker, ["load", "clear"]), (Rounder, ["load"])):
        for name in names:
            patch.setattr(kind, name, nothing)
    patch.setattr(loading._Loader, "_arranged", lambda loader, name, *rows: loader._file.raw(name))
    patch.setattr(runner, "checked_products", lambda *arguments: ())
