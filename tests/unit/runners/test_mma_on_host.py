"""Products by `mma_gemm.cu`, compiled for the host, lane by lane, against float64."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.model.spec import Activation
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Format, Matrix
from nightmill.worker.runners.gpu.products.elements import mma_gemm
from nightmill.worker.runners.gpu.products.elements.mma_gemm import MmaTiles
from nightmill.worker.runners.gpu.products.fp8.mma_fp8 import MmaFp8
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES, MmaTile, mma_tiles
from nightmill.worker.runners.gpu.shapes import SUMMED, Kind, Shape
from nightmill.worker.runners.reference import ops
from tests.gpu.test_fp8 import Rows
from tests.support.elements import as_words, rounded
from tests.support.operands import fetched, fp8_room, poisoned
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.host_launchers import run_mma_on_host

pytestmark = pytest.mark.heavy

# Rows and outputs that fill no tile, inputs that fill no stage, results with others between them; and more
# tiles of rows than are numbered together.
CASES = {
    Kind.PLAIN: (MMA_TILES[5], 150, 88, 72, 96),
    Kind.FLOAT: (MMA_TILES[4], 21, 72, 200, 80),
    Kind.SWIGLU: (MMA_TILES[3], 35, 40, 136, None),
    Kind.GEGLU: (MMA_TILES[2], 5, 40, 72, None),
    Kind.RESIDUAL: (MMA_TILES[1], 66, 136, 72, None),
    Kind.ADDEND: (MMA_TILES[0], 20, 136, 72, None),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.value)
def test_each_kind_by_each_tile(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_mma_on_host(monkeypatch, tmp_path)
    tile, rows, outputs, inputs, pitch = CASES[kind]
    element = Element.BF16 if kind is Kind.SWIGLU else Element.F16
    found, before, sums = computed(
        HostDevice(element), kind, tile, Shape(rows, outputs, inputs, kind, pitch=pitch)
    )
    if kind.activation is not None:
        gate_up = rounded(sums.astype(np.float32), element)
        gated = ops.swiglu if kind.activation is Activation.SILU else ops.geglu
        np.testing.assert_allclose(found, gated(gate_up), rtol=0.02, atol=0.02)
    elif kind in (Kind.RESIDUAL, Kind.FLOAT, Kind.ADDEND):
        np.testing.assert_allclose(found, sums + (before if kind is Kind.RESIDUAL else 0.0), atol=2e-5)
    else:
        np.testing.assert_array_equal(found, rounded(found, element))
        np.testing.assert_allclose(found, sums, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", SUMMED, ids=lambda kind: kind.value)
def test_two_sums_are_added_one_after_the_other(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on Hopper: each from an accumulator of its own, with other bits than one sum."""
    run_mma_on_host(monkeypatch, tmp_path)
    monkeypatch.setattr(mma_gemm, "first_sum", lambda outputs, inputs: 64)
    tile, shape = MMA_TILES[5], Shape(3, 32, 136, kind)
    one, before, sums = computed(HostDevice(), kind, tile, shape)
    device = HostDevice()
    device.hopper = True
    two, _, _ = computed(device, kind, tile, shape)
    start = before if kind is Kind.RESIDUAL else np.zeros_like(before)
    np.testing.assert_allclose(two, start + sums, atol=2e-5)
    assert (one != two).any() and np.abs(one - two).max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "tile"),
    [(Kind.PLAIN, MMA_TILES[5]), (Kind.SWIGLU, MMA_TILES[4]), (Kind.RESIDUAL, MMA_TILES[2])],
    ids=lambda value: value.name if isinstance(value, MmaTile) else value.value,
)
def test_products_of_fp8(kind: Kind, tile: MmaTile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scales of rows and outputs, and inputs that fill no stage."""
    run_mma_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice()
    rows, outputs, inputs, rng = 19, 40, 176, np.random.default_rng(3)
    x = Rows(device, rows, inputs, rng)
    weight = Rows(device, outputs * (1 + (kind is Kind.SWIGLU)), inputs, rng)
    before = rng.standard_normal((rows, outputs)).astype(np.float32)
    y = poisoned(device, (rows + 1, outputs), FLOAT if kind is Kind.RESIDUAL else ELEMENT)
    if kind is Kind.RESIDUAL:
        ctypes.memmove(y.address, before.ctypes.data, before.nbytes)
    shape = Shape(rows, outputs, inputs, kind, Format.FP8)
    products = MmaFp8(device, [kind], fp8_room(device, 0, 0))
    products.kernel(tile, shape)(x.buffer, weight.matrix, y)
    found, exact = fetched(device, y), x.exact @ weight.exact.T
    if kind is Kind.RESIDUAL:
        np.testing.assert_allclose(found[:rows], before + exact, atol=1e-5)
    elif kind is Kind.SWIGLU:
        np.testing.assert_allclose(found[:rows], ops.swiglu(exact), rtol=0.01, atol=0.01)
    else:
        np.testing.assert_allclose(found[:rows], exact, rtol=1e-3, atol=1e-3)
    assert np.isnan(found[rows]).all(), "wrote past its rows"


def computed(
    device: Any, kind: Kind, tile: MmaTile, shape: Shape
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """What is found by a tile, what was there before, and the sums; poison is behind all rows and outputs."""
    element, rows, outputs, inputs = device.element, shape.rows, shape.outputs, shape.inputs
    rng = np.random.default_rng(rows)
    weight_rows = outputs if kind.activation is None else 2 * outputs
    values = rounded(rng.standard_normal((rows, inputs)).astype(np.float32), element)
    weights = rounded((rng.standard_normal((weight_rows, inputs)) / 8).astype(np.float32), element)
    x = poisoned(device, (rows + 1, inputs), ELEMENT)
    words = as_words(values, element)
    ctypes.memmove(x.address, words.ctypes.data, words.nbytes)
    matrix = Matrix(device.upload(as_words(weights, element)), weight_rows, inputs, element.format)
    pitch = shape.pitch or outputs
    floats = kind in (Kind.FLOAT, *SUMMED)
    y = poisoned(device, (rows + 1, pitch), FLOAT if floats else ELEMENT)
    before = rng.standard_normal((rows, outputs)).astype(np.float32)
    if kind is Kind.RESIDUAL:
        ctypes.memmove(y.address, before.ctypes.data, before.nbytes)
    MmaTiles(device, alone=True).kernel(tile, shape)(x, matrix, y)
    found = fetched(device, y)
    assert np.isnan(found[rows:]).all() and np.isnan(found[:, outputs:]).all(), "wrote past its results"
    return found[:rows, :outputs], before, values.astype(np.float64) @ weights.astype(np.float64).T


def test_tiles_fit_every_gpu_and_take_any_number_of_rows() -> None:
    for kind in Kind:
        for rows in (1, 8, 16, 17, 32, 33, 64, 65, 512, 1024, 16_384):
            tiles = mma_tiles(kind, rows)
            assert tiles and all(tile.takes(kind) for tile in tiles)
    assert max(tile.shared for tile in MMA_TILES) <= 99 << 10
