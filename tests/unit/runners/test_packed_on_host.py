"""Packed weights without a GPU: kernels that repack and unpack, compiled for the host, against NumPy."""

import ctypes
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.runners.gpu.device.compiler import kernel_directory
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, FLOAT, Format, Matrix
from nightmill.worker.runners.gpu.products.packed import packed_gemm
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedTile, PackedTiles
from nightmill.worker.runners.gpu.products.packed.packed_mma import PackedMma, PackedMmaTile
from nightmill.worker.runners.gpu.products.packed.packed_rows import PackedRows
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Candidate, Kind, Shape
from nightmill.worker.runners.gpu.weights.repacker import Repacker
from tests.support.blocks import random_blocks
from tests.support.elements import as_words, from_words, rounded, without_signs_of_zeros
from tests.support.needs import Need, missing
from tests.support.operands import fetched, poisoned
from tests.support.packed_elements import as_packed_words
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.host_launchers import run_packed_on_host

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent / "cuda_on_host"
PACKED = [kept for kept in Format if kept.packed]
THREADS = 256


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
    folder = tmp_path_factory.mktemp("kernels")
    source, library = folder / "packed.cpp", folder / "packed.so"
    source.write_text('#include "weights/repack.cu"\n#include "products/packed/unpack.cu"\n')
    includes = [f"-I{path}" for path in (HERE / "rows", HERE, kernel_directory())]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    subprocess.run([compiler, *flags, *element.options, *includes, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def launch(kernels: ctypes.CDLL, name: str, threads: int, *arguments: Any) -> None:
    """Run so many threads, and those that fill their last block."""
    kernel, (block, thread) = (
        kernels[name],
        (_Index.in_dll(kernels, name) for name in ("blockIdx", "threadIdx")),
    )
    _Index.in_dll(kernels, "blockDim").x = THREADS
    for at in range(-(-threads // THREADS) * THREADS):
        block.x, thread.x = divmod(at, THREADS)
        kernel(*arguments)


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """So many bytes that are not read before they are written, at a multiple of 16."""
    held = np.full(size + 16, 0xFF, dtype=np.uint8)
    first = -held.ctypes.data % 16
    return held[first : first + size]


def repacked(
    kernels: ctypes.CDLL, kept: Format, raw: npt.NDArray[np.uint8], columns: int, first: int = 0
) -> npt.NDArray[np.uint8]:
    """A matrix, made of rows from `first` on, and then of those before."""
    rows = len(raw)
    matrix, bad = aligned(kept.bytes(rows, columns)), np.zeros(1, dtype=np.int32)
    matrix[:] = 0
    for start, end in ((first, rows), (0, first)):
        part = np.ascontiguousarray(raw[start:end])
        launch(
            kernels, f"repack_{kept.name}", (end - start) * columns // 32, pointer(part), pointer(matrix),
            ctypes.c_int64(start), ctypes.c_int64(end - start), columns, pointer(bad),
        )  # fmt: skip
    assert not bad[0]
    return matrix


@pytest.mark.parametrize("kept", PACKED, ids=lambda kept: kept.name)
def test_packed_weights_are_the_elements_of_the_definition(
    kernels: ctypes.CDLL, element: Element, kept: Format
) -> None:
    """Rows of two tensors, which end in the middle of a panel, and of a packet where a type allows that."""
    kind = GGMLQuantizationType[kept.name]
    block, size = GGML_QUANT_SIZES[kind]
    assert kept.packet * block == 8 * kept.step * size, "a packet has the file's bytes, and no more"
    rows, columns, first = 13, 7 * 32 if block == 32 else 512, 5
    blocks = random_blocks(kind, rows * columns // block)
    raw = blocks.reshape(rows, -1)
    expected = as_packed_words(blocks, kind, element).reshape(rows, columns)
    matrix = repacked(kernels, kept, raw, columns, first)
    out = aligned((rows + 1) * columns * 2).view(np.uint16).reshape(rows + 1, columns)
    _Index.in_dll(kernels, "gridDim").y = 1  # so that a block goes through both panels
    launch(kernels, f"unpack_{kept.name}", THREADS, pointer(matrix), pointer(out), rows, columns)
    np.testing.assert_array_equal(*map(without_signs_of_zeros, (out[:rows], expected)))
    assert (out[rows] == 0xFFFF).all(), "wrote past its rows"


def test_a_weight_beyond_half_is_noticed(kernels: ctypes.CDLL, element: Element) -> None:
    raw = random_blocks(GGMLQuantizationType.Q4_K, 8)
    raw[3, :2] = np.array([60_000], dtype="<f2").view(np.uint8)
    matrix, bad = aligned(Format.Q4_K.bytes(8, 256)), np.zeros(1, dtype=np.int32)
    arguments = pointer(raw), pointer(matrix), ctypes.c_int64(0), ctypes.c_int64(8), 256, pointer(bad)
    launch(kernels, "repack_Q4_K", 64, *arguments)
    assert bool(bad[0]) == (element is Element.F16)


def test_products_of_few_rows(
    kernels: ctypes.CDLL, element: Element, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a stack of two matrices, of which one ends within a panel; poison is behind all rows."""
    run_packed_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice(element)
    rows, inputs, kept = 19, 288, Format.Q5_1
    rng = np.random.default_rng(0)
    values = rounded(rng.standard_normal((rows, inputs)).astype(np.float32), element)
    parts, exact = [], []
    for size in (21, 40):
        blocks = random_blocks(GGMLQuantizationType.Q5_1, size * inputs // 32)
        of_part = as_packed_words(blocks, GGMLQuantizationType.Q5_1, element)
        exact.append(from_words(of_part, element).reshape(size, inputs))
        address = device.upload(repacked(kernels, kept, blocks.reshape(size, -1), inputs))
        parts.append(Matrix(address, size, inputs, kept))
    outputs = sum(part.rows for part in parts)
    weight = Matrix(parts[0].address, outputs, inputs, Format.MIXED, parts=tuple(parts))
    before = rng.standard_normal((rows, outputs)).astype(np.float32)
    x = poisoned(device, (rows + 1, inputs), ELEMENT)
    words = as_words(values, element)
    ctypes.memmove(x.address, words.ctypes.data, words.nbytes)
    y = poisoned(device, (rows + 1, outputs + 3), FLOAT)
    for row in range(rows):
        ctypes.memmove(y.from_row(row).address, before[row].ctypes.data, before[row].nbytes)
    products = PackedRows(device, [kept], Activate(device), ABSENT)
    shape = Shape(rows, outputs, inputs, Kind.RESIDUAL, Format.MIXED, pitch=outputs + 3)
    (candidate,) = products.candidates(shape)
    candidate.kernel(shape)(x, weight, y)
    found = fetched(device, y)
    wanted = before + values.astype(np.float64) @ np.concatenate(exact).astype(np.float64).T
    np.testing.assert_allclose(found[:rows, :outputs], wanted, atol=1e-4)
    assert np.isnan(found[rows]).all()
    assert np.isnan(found[:, outputs:]).all(), "wrote past its outputs"


@pytest.mark.parametrize(
    ("tile", "rows", "kept", "kind"),
    [
        pytest.param(PackedMmaTile(64, 64, 8), 19, Format.Q5_1, Kind.RESIDUAL, marks=pytest.mark.slow),
        (PackedMmaTile(64, 128, 8), 70, Format.Q4_K, Kind.PLAIN),
        pytest.param(PackedMmaTile(128, 64, 8), 20, Format.Q6_K, Kind.ADDEND, marks=pytest.mark.slow),
        pytest.param(PackedMmaTile(128, 128, 8), 130, Format.Q8_0, Kind.FLOAT, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
def test_tiles_of_many_rows_have_the_bits_of_few(
    kernels: ctypes.CDLL, element: Element, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *,
    tile: PackedMmaTile, rows: int, kept: Format, kind: Kind,
) -> None:  # fmt: skip
    """With a stack of two matrices, the first of which ends within a panel, or within a tile, and poison."""
    run_packed_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice(element)
    type_ = GGMLQuantizationType[kept.name]
    inputs = 512 if kept.step == 256 else 288
    sizes = (24, 40) if kind is Kind.PLAIN else (21, 70)  # of which elements leave in pieces of 16 bytes
    parts = []
    for size in sizes:
        blocks = random_blocks(type_, size * inputs // GGML_QUANT_SIZES[type_][0])
        address = device.upload(repacked(kernels, kept, blocks.reshape(size, -1), inputs))
        parts.append(Matrix(address, size, inputs, kept))
    outputs = sum(sizes)
    weight = Matrix(parts[0].address, outputs, inputs, Format.MIXED, parts=tuple(parts))
    rng = np.random.default_rng(rows)
    before = rng.standard_normal((rows, outputs)).astype(np.float32)
    x = poisoned(device, (rows + 1, inputs), ELEMENT)
    words = as_words(rounded(rng.standard_normal((rows, inputs)).astype(np.float32), element), element)
    ctypes.memmove(x.address, words.ctypes.data, words.nbytes)
    pitch = outputs + 8
    few, many = (launcher(device, [kept], Activate(device), ABSENT) for launcher in (PackedRows, PackedMma))
    found = []
    for whole in (False, True):
        y = poisoned(device, (rows + 1, pitch), ELEMENT if kind is Kind.PLAIN else FLOAT)
        if kind is Kind.RESIDUAL:
            for row in range(rows):
                ctypes.memmove(y.from_row(row).address, before[row].ctypes.data, before[row].nbytes)
        for first in (0,) if whole else range(0, rows, 64):
            count = rows if whole else min(64, rows - first)
            shape = Shape(count, outputs, inputs, kind, Format.MIXED, pitch=pitch)
            kernel = many.kernel(tile, shape) if whole else few.kernel(4, shape)
            kernel(x.from_row(first), weight, y.from_row(first))
        found.append(fetched(device, y))
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[1][:rows, :outputs]).all()
    assert np.isnan(found[1][rows]).all() and np.isnan(found[1][:, outputs:]).all(), "wrote past its results"


@pytest.mark.parametrize(
    ("rows", "columns", "cleared"),
    [(8, 256, False), (16, 64, False), (5, 256, True), (13, 256, True), (16, 96, True)],
)
def test_what_a_matrix_has_beside_its_rows_is_zeroed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: int, columns: int, cleared: bool
) -> None:
    """Rows of an LM head behind the vocabulary, of its last panel, and inputs of the last packets."""
    run_packed_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice()
    matrix = Matrix(device.allocate(1 << 16), -(-rows // 8) * 8, columns, Format.Q8_0)
    device.fill(matrix.address, 0xFF, 1 << 16)
    staging: Any = None
    Repacker(device, staging).clear(matrix, rows)
    held = device.download(matrix.address, (1 << 16,), np.uint8)
    assert (held[matrix.bytes :] == 0xFF).all()
    assert set(held[: matrix.bytes]) == {0 if cleared else 0xFF}


WHOLE = (PackedTile(1, 64, 1, 1, 2), PackedTile(3, 128, 2))
RELAYS = (PackedTile(3, 8, 4, relay=1, turn=2), PackedTile(3, 32, 4, relay=2))


@pytest.mark.parametrize(
    ("kept", "kind", "inputs", "tiles"),
    [
        (Format.Q8_0, Kind.RESIDUAL, 192, WHOLE[:1]),
        pytest.param(Format.Q8_0, Kind.ADDEND, 224, WHOLE, marks=pytest.mark.slow),
        pytest.param(Format.Q5_0, Kind.RESIDUAL, 1312, (*WHOLE, *RELAYS), marks=pytest.mark.slow),
        pytest.param(Format.Q4_K, Kind.FLOAT, 1280, (*WHOLE, *RELAYS), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, Format | Kind) else "",
)
def test_kernels_for_hopper_have_the_bits_of_those_for_other_gpus(
    kernels: ctypes.CDLL, element: Element, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, kept: Format,
    kind: Kind, inputs: int, tiles: tuple[PackedTile, ...],
) -> None:  # fmt: skip
    """Also where inputs end within a step, and where a block has several tiles."""
    run_packed_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice(element)
    type_, rows, outputs = GGMLQuantizationType[kept.name], 5, 136
    raw = random_blocks(type_, outputs * inputs // GGML_QUANT_SIZES[type_][0]).reshape(outputs, -1)
    weight = Matrix(device.upload(repacked(kernels, kept, raw, inputs)), outputs, inputs, kept)
    rng = np.random.default_rng(inputs)
    words = as_words(rounded(rng.standard_normal((rows, inputs)).astype(np.float32) * 9, element), element)
    before = rng.standard_normal((rows, outputs)).astype(np.float32)
    x = poisoned(device, (rows + 1, inputs), ELEMENT)
    ctypes.memmove(x.address, words.ctypes.data, words.nbytes)
    monkeypatch.setattr(packed_gemm, "PACKED_TILES", {kind: tiles})
    device.multiprocessors = 2
    launcher, shape = PackedTiles(device, [(kind, kept)]), Shape(rows, outputs, inputs, kind, kept)
    ways = PackedRows(device, [kept], Activate(device), ABSENT).candidates(shape)
    ways += PackedFew(device, [(kind, kept)]).candidates(shape)
    ways += [Candidate(tile.name, partial(launcher.kernel, tile)) for tile in tiles if tile.suits(shape)]
    assert len(ways) == 2 + len(tiles)
    found = []
    for way in ways:
        y = poisoned(device, (rows + 1, outputs), FLOAT)
        if kind is Kind.RESIDUAL:
            ctypes.memmove(y.address, before.ctypes.data, before.nbytes)
        way.kernel(shape)(x, weight, y)
        found.append(fetched(device, y))
        np.testing.assert_array_equal(found[-1][:rows], found[0][:rows], err_msg=way.name)
        assert np.isnan(found[-1][rows]).all(), f"{way.name} wrote past its rows"
