"""Rows as FP8, tiles for products of such, and the reference runner that multiplies them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Role
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.fp8.hopper_fp8 import FP8_TILES, fp8_tiles
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.weights.layout import formats_in, layer_weights, runs_of, weight_bytes
from nightmill.worker.runners.reference.loading import load_layer
from nightmill.worker.runners.reference.rounding import as_fp8, to_fp8
from tests.support.driving import BLOCK, Chunk, Pages, Reference, logits_of
from tests.support.family_cases import FILES, file_of
from tests.support.ggufs import write_model
from tests.support.specs import dense_spec

SHARED = 227 << 10  # bytes that a block of Hopper can have
REGISTERS = 65_536  # of a multiprocessor


def test_a_row_has_a_scale_with_which_its_largest_number_is_the_largest_of_fp8() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((50, 640)) * np.exp(4 * rng.standard_normal((50, 1)))).astype(np.float32)
    numbers, scales = to_fp8(x)
    assert (np.abs(numbers).max(axis=1) == 448).all()
    largest = np.abs(x).max(axis=1, keepdims=True)
    np.testing.assert_allclose(scales * 448, largest, rtol=1e-6)
    clear = np.abs(x) > largest / 2**14  # others are as far apart as numbers below 2^-6 are
    assert (np.abs(as_fp8(x) - x)[clear] <= np.abs(x)[clear] / 16 * (1 + 1e-6)).all()
    np.testing.assert_array_equal(as_fp8(x)[7:8], as_fp8(x[7:8]))


def test_a_row_of_nothing_stays_so_and_one_that_is_no_number_does_too() -> None:
    x = np.zeros((3, 8), dtype=np.float32)
    x[1, 3], x[2, 5] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        result = as_fp8(x)
    assert (result[0] == 0).all()
    assert np.isnan(result[1, 3])
    assert np.isnan(result[2, 5])


@pytest.mark.parametrize("kind", FP8_TILES, ids=str)
def test_every_number_of_rows_has_tiles_that_a_multiprocessor_holds(kind: Kind) -> None:
    for tile in FP8_TILES[kind]:
        assert tile.shared <= SHARED
        assert tile.threads * 168 <= REGISTERS or tile.groups == 1
    for rows in (*range(1, 70), 128, 256, 512, 640, 1024, 16_384):
        tiles = fp8_tiles(kind, rows)
        assert tiles
        assert all(tile.rows >= min(rows, 64) for tile in tiles)


def test_matrices_of_layers_are_fp8_and_their_scales_are_counted() -> None:
    spec = dense_spec(layers=2)
    types = {name: "Q8_0" for _, weight in spec.all_weights() if weight.is_matrix for name in weight.names}
    spec = replace(spec, tensor_types=types)
    fp8, half = Precision(weights=WeightsFormat.FP8), Precision()
    inner = (Role.QKV, Role.ATTN_OUTPUT, Role.GATE_UP, Role.FFN_DOWN)
    assert formats_in(spec, fp8, *inner) == {Format.FP8}
    assert formats_in(spec, fp8, Role.EMBEDDING, Role.HEAD) == {Format.F16}
    shapes = [weight.shape for role, weight in spec.all_weights() if role in inner]
    saved = sum(rows * columns - 4 * rows for rows, columns in shapes)
    assert abs(weight_bytes(spec, half) - weight_bytes(spec, fp8) - saved) <= 256 * len(shapes)


@pytest.mark.parametrize("name", FILES)
def test_the_reference_rounds_the_matrices_that_a_gpu_keeps_in_fp8(name: str, tmp_path: Path) -> None:
    keys, like = FILES[name]
    file, fp8 = file_of(tmp_path, keys, like), Precision(weights=WeightsFormat.FP8)
    spec = read_spec(file)
    for index, layer in enumerate(spec.layers):
        exact, rounding = (
            load_layer(file, layer, spec.layer_weights(index), fp8=rounds) for rounds in (False, True)
        )
        rounded = {role for role, weight in exact.items() if not _same(weight, rounding[role])}
        kept = {
            role
            for role, weight in layer_weights(spec, index).items()
            if weight.is_matrix and {run.format for run in runs_of(spec, role, weight, fp8)} == {Format.FP8}
        }
        assert rounded == kept - {Role.ATTN_GATE}  # which are rows of QKV with NumPy


def _same(weight: np.ndarray, other: np.ndarray) -> bool:
    """True if a weight is the other, or has its first outputs: further ones are kept apart."""
    return np.array_equal(weight[..., : other.shape[-1]], other)


def test_the_reference_rounds_and_a_row_does_not_depend_on_others(tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", width=64, ffn=160, context_length=64, seed=2))
    spec = read_spec(file)
    tokens = np.random.default_rng(1).integers(0, spec.vocab, (2, 20)).tolist()
    chunks = [Chunk(slot, tokens[slot], 0, 20, 20) for slot in range(2)]

    def logits(wanted: list[Chunk], *, fp8: bool) -> np.ndarray:
        reference = Reference(file, spec, slots=2, kv_pages=8, fp8=fp8)
        assert reference.runner.arithmetic.weights == ("fp8 in f32" if fp8 else "f32")
        return logits_of(reference, Pages(2, 64 // BLOCK), wanted, admit=True)

    together, exact = logits(chunks, fp8=True), logits(chunks, fp8=False)
    np.testing.assert_array_equal(logits(chunks[1:], fp8=True), together[20:])
    error = np.square(together - exact).sum() / np.square(exact).sum()
    assert 1e-4 < error < 0.05
