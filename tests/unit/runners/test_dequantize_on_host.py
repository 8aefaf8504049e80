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
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.sources import for_element, source_of
from nightmill.worker.runners.gpu.weights.dequantizer import SUPPORTED
from nightmill.worker.runners.gpu.weights.grids import grid_of
from tests.support.blocks import random_blocks
from tests.support.elements import as_words
from tests.support.needs import Need, missing

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent / "cuda_on_host"
THREADS = 64
BLOCKS = 7  # of a type; an odd number


class _Index(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


@pytest.fixture(scope="module", params=Element, ids=lambda element: element.value)
def element(request: pytest.FixtureRequest) -> Element:
    found: Element = request.param
    return found


@pytest.fixture(scope="module")
def kernels(element: Element, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        missing(Need.COMPILER)
    library = tmp_path_factory.mktemp("kernels") / "dequantize.so"
    path, of_element = for_element(source_of("dequantize"), element)
    includes = [f"-I{folder}" for folder in (HERE, path.parent, kernel_directory())]
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    subprocess.run([compiler, *options, *of_element, *includes, "-x", "c++", path, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def launch(
    kernels: ctypes.CDLL, kind: GGMLQuantizationType, blocks: npt.NDArray[np.uint8], out: npt.NDArray[Any],
    count: int,
) -> bool:  # fmt: skip
    """Whether all `count` numbers fit the type of `out`: floats, or 16-bit words of elements."""
    name = {np.dtype(np.float32): "f32", np.dtype(np.uint16): "element"}[out.dtype]
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
def test_a_kernel_gives_the_bits_of_gguf(
    kernels: ctypes.CDLL, element: Element, kind: GGMLQuantizationType
) -> None:
    blocks = random_blocks(kind, BLOCKS)
    exact = dequantize(blocks, kind).reshape(-1)
    poison = np.uint32(0x7FC0_0000), np.uint16(0x7FFF)
    for expected, nan in zip((exact.view(np.uint32), as_words(exact, element)), poison, strict=True):
        held = np.full(exact.size + THREADS, nan)
        out = held.view(np.float32) if held.itemsize == 4 else held
        assert launch(kernels, kind, blocks, out, exact.size)
        np.testing.assert_array_equal(held[: exact.size], expected)
        assert (held[exact.size :] == nan).all()


@pytest.mark.parametrize("value", [65520.0, -1e30, 3.4e38, np.inf, np.nan])
def test_what_an_element_cannot_hold_is_noticed(kernels: ctypes.CDLL, element: Element, value: float) -> None:
    weights = np.array([1.0, value, element.largest], dtype=np.float32)
    fits = launch(kernels, GGMLQuantizationType.F32, weights.view(np.uint8), np.zeros(3, np.uint16), 3)
    assert fits == (element is Element.BF16 and abs(value) < 1e38)
    weights[1] = 2.0
    assert launch(kernels, GGMLQuantizationType.F32, weights.view(np.uint8), np.zeros(3, np.uint16), 3)
