"""The kernels that dequantise, compiled for the host, against the `gguf` package: bit for bit.

So what they compute is known without a GPU; `tests/gpu/test_weights.py` holds what nvcc makes of them.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from nightmill.worker.runners.gpu.device.compiler import kernel_directory
from nightmill.worker.runners.gpu.device.sources import source_of
from nightmill.worker.runners.gpu.weights.dequantizer import SUPPORTED
from nightmill.worker.runners.gpu.weights.grids import grid_of
from tests.blocks import random_blocks

HERE = Path(__file__).parent / "cuda_on_host"
THREADS = 64
BLOCKS = 7  # of a type; an odd number


class _Index(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("kernels") / "dequantize.so"
    path, _ = source_of("dequantize")
    includes = [f"-I{folder}" for folder in (HERE, path.parent, kernel_directory())]
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    subprocess.run([compiler, *options, *includes, "-x", "c++", path, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def launch(
    kernels: ctypes.CDLL, kind: GGMLQuantizationType, blocks: npt.NDArray[np.uint8], out: npt.NDArray[Any],
    count: int,
) -> bool:  # fmt: skip
    """Whether all `count` numbers fit the type of `out`."""
    name = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}[out.dtype]
    kernel = kernels[f"dequantize_{kind.name}_{name}"]
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    grid, bad = grid_of(kind), np.zeros(1, dtype=np.int32)
    of_grid = None if grid is None else grid.ctypes.data
    arguments = (blocks.ctypes.data, out.ctypes.data, count, of_grid, bad.ctypes.data)
    block, thread = (_Index.in_dll(kernels, name) for name in ("blockIdx", "threadIdx"))
    _Index.in_dll(kernels, "blockDim").x = THREADS
    for at in range(-(-count // THREADS) * THREADS):
        block.x, thread.x = divmod(at, THREADS)
        kernel(*arguments)
    return not bad[0]


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_kernel_gives_the_bits_of_gguf(
    kernels: ctypes.CDLL, kind: GGMLQuantizationType, dtype: type[np.floating[Any]]
) -> None:
    blocks = random_blocks(kind, BLOCKS)
    expected = dequantize(blocks, kind).reshape(-1).astype(dtype)
    out = np.full(expected.size + THREADS, np.nan, dtype=dtype)
    assert launch(kernels, kind, blocks, out, expected.size)
    bits = f"u{out.itemsize}"
    np.testing.assert_array_equal(out[: expected.size].view(bits), expected.view(bits))
    assert np.isnan(out[expected.size :]).all()


@pytest.mark.parametrize("value", [65520.0, -1e30, np.inf, np.nan])
def test_what_half_cannot_hold_is_noticed(kernels: ctypes.CDLL, value: float) -> None:
    weights = np.array([1.0, value, 65504.0], dtype=np.float32)
    assert not launch(kernels, GGMLQuantizationType.F32, weights.view(np.uint8), np.zeros(3, np.float16), 3)
    weights[1] = 2.0
    assert launch(kernels, GGMLQuantizationType.F32, weights.view(np.uint8), np.zeros(3, np.float16), 3)
