"""FP8 weights on Hopper: what a file becomes, products against float64, models against the reference."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, FP8, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.loading import load_weights
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.fp8.format import Fp8Format
from nightmill.worker.runners.gpu.products.fp8.hopper_fp8 import FP8_TILES
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES
from nightmill.worker.runners.gpu.shapes import SUMMED, Kind, Shape
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.rounding import to_fp8
from tests.support.comparing import nmse
from tests.support.cuda_runners import need_fp8
from tests.support.driving import BLOCK, Chunk, Cuda, HasLogits, Pages, Reference, logits_of
from tests.support.elements import BOTH_ELEMENTS, ROUNDED_ONCE, rounded
from tests.support.family_cases import GPU_FILES, file_of
from tests.support.ggufs import half_tensors, write_model
from tests.support.operands import Array, buffer, elements, fetched, fetched_fp8, fp8_room, poisoned

ROWS = (1, 7, 63, 65, 257)
SIZES = ((1152, 896), (520, 80), (264, 18_944))  # outputs, inputs


@pytest.fixture(autouse=True)
def fp8() -> None:
    need_fp8()


def bytes_of(numbers: Array) -> Array:
    """Of numbers that are E4M3."""
    magnitudes = np.abs(numbers)
    exponents = np.maximum(np.frexp(magnitudes)[1] - 1, -6)
    mantissas = np.ldexp(magnitudes, 3 - exponents).astype(np.int64)
    words = np.where(mantissas < 8, mantissas, (exponents + 7) * 8 + mantissas - 8)
    return (words | np.signbit(numbers) * 128).astype(np.uint8)


class Rows:
    """Random rows, in FP8: on the device, followed by one of NaN, and as float64."""

    def __init__(self, device: Device, rows: int, columns: int, rng: np.random.Generator) -> None:
        sizes = rng.uniform(0.01, 10, (rows, 1)) / np.sqrt(columns)
        numbers, scales = to_fp8((rng.standard_normal((rows, columns)) * sizes).astype(np.float32))
        self.exact = numbers.astype(np.float64) * scales
        words = np.vstack([bytes_of(numbers), np.full((1, columns), 0x7F, dtype=np.uint8)])
        self._numbers = device.upload(words)
        self._scales = device.upload(np.append(scales, np.float32(np.nan)).astype(np.float32))
        self._shape = rows, columns

    @property
    def buffer(self) -> Buffer:
        return Buffer(self._numbers, self._shape, FP8, self._scales)

    @property
    def matrix(self) -> Matrix:
        return Matrix(self._numbers, *self._shape, Format.FP8, self._scales)


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", FP8_TILES, ids=str)
def test_every_tile_is_exact_and_gives_the_same_bits(device: Device, kind: Kind) -> None:
    products: Any = Fp8Format().launcher(device, [kind], fp8_room(device, 0, 0))
    tiles: Any = FP8_TILES[kind] if device.hopper else [tile for tile in MMA_TILES if tile.takes(kind)]
    rng = np.random.default_rng(1)
    gated, floats = kind.activation is not None, kind in SUMMED
    for outputs, inputs in SIZES:
        weight = Rows(device, 2 * outputs if gated else outputs, inputs, rng)
        for rows in ROWS:
            x = Rows(device, rows, inputs, rng)
            exact = x.exact @ weight.exact.T
            before = rng.standard_normal((rows, outputs)).astype(np.float32)
            if kind is Kind.RESIDUAL:
                exact += before
            if gated:
                activation = ops.geglu if kind is Kind.GEGLU else ops.swiglu
                exact = activation(rounded(exact, device.element).astype(np.float64))
            first = None
            for tile in tiles:
                held = np.full((rows + 1, outputs), np.nan, dtype=np.float32)
                if kind is Kind.RESIDUAL:
                    held[:rows] = before
                y = buffer(device, held) if floats else poisoned(device, held.shape, ELEMENT)
                shape = Shape(rows, outputs, inputs, kind, Format.FP8)
                products.kernel(tile, shape)(x.buffer, weight.matrix, y)
                result = fetched(device, y)
                case = f"{tile}, {rows} rows of {inputs}, {outputs} outputs"
                assert np.isnan(result[rows]).all(), f"{case}: wrote past its rows"
                error = nmse(result[:rows], exact)
                assert error <= (1e-6 if floats else 4 * ROUNDED_ONCE[device.element]), f"{case}: {error}"
                first = result if first is None else first
                np.testing.assert_array_equal(result, first, err_msg=case)
                device.free(y.address)


def test_rows_of_elements_are_rounded_before_they_are_multiplied(device: Device) -> None:
    rng = np.random.default_rng(2)
    x = elements(device, rng.standard_normal((9, 896)))
    weight = Rows(device, 520, 896, rng).matrix
    given: Any = Fp8Format().launcher(device, [Kind.ADDEND], fp8_room(device, 9, 896))
    quantised = fp8_room(device, 9, 896)
    given._quantise(x.address, quantised.address, quantised.scales, 9, 896)
    way = given.candidates(Shape(9, 520, 896, Kind.ADDEND, Format.FP8))[0].kernel(
        Shape(9, 520, 896, Kind.ADDEND, Format.FP8)
    )
    results = []
    for rows in (x, quantised):
        y = poisoned(device, (9, 520), FLOAT)
        way(rows, weight, y)
        results.append(fetched(device, y))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(*results)


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_matrices_of_layers_are_rounded_and_others_stay(device: Device, tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", kind=GGMLQuantizationType[kind], tied=False)
    file = GgufFile.open(path)
    spec = read_spec(file)
    weights = load_weights(device, file, spec, Precision(device.element, WeightsFormat.FP8))
    assert weights.embedding.format is weights.head.format is device.element.format
    for index, layer in enumerate(weights.layers):
        for held, names in (
            (layer.qkv, ("attn_q", "attn_k", "attn_v")),
            (layer.attn_output, ("attn_output",)),
            (layer.gate_up, ("ffn_gate", "ffn_up")),
            (layer.ffn_down, ("ffn_down",)),
        ):
            own = np.concatenate([file.array(f"blk.{index}.{name}.weight") for name in names])
            numbers, scales = fetched_fp8(device, held, own.shape)
            expected = to_fp8(rounded(own, device.element).astype(np.float32))
            np.testing.assert_array_equal(numbers, expected[0])
            np.testing.assert_array_equal(scales, expected[1])


@pytest.mark.parametrize("name", GPU_FILES)
def test_every_family_is_computed_as_by_the_reference(name: str, tmp_path: Path) -> None:
    """A prompt, then a few tokens; nearer to the reference that rounds than that is to one that does not.

    Not near to the last bit: a number that attention, in half precision, moves over a border between two of
    FP8 moves far.
    """
    keys, like = GPU_FILES[name]
    file = file_of(tmp_path, keys, like, **half_tensors(like))
    spec = read_spec(file)
    text = np.random.default_rng(5).integers(0, spec.vocab, 78).tolist()
    chunks = [Chunk(0, text, 0, 70, 70), *(Chunk(0, text, 70 + i, 1, drawn=True) for i in range(8))]
    options = {"slots": 1, "kv_pages": 128 // BLOCK}

    def logits(subject: HasLogits) -> Array:
        pages = Pages(1, 128 // BLOCK)
        steps = [logits_of(subject, pages, [one], admit=i == 0) for i, one in enumerate(chunks)]
        return np.concatenate(steps)

    rounding, exact = (logits(Reference(file, spec, fp8=fp8, **options)) for fp8 in (True, False))
    sizes = {"max_tokens": 128, "max_draws": 128, "context": 128}
    cuda = Cuda(file, spec, **options, **sizes, tune=False, precision=Precision(weights=WeightsFormat.FP8))
    with closing(cuda.runner):
        off = nmse(logits(cuda), rounding)
    print(f"{name}: NMSE {off:.3g}, of rounding {nmse(exact, rounding):.3g}")  # noqa: T201
    assert off < 0.5 * nmse(exact, rounding)


@pytest.mark.parametrize("element", Element, ids=lambda element: element.value)
def test_a_runner_says_how_it_rounds(tmp_path: Path, element: Element) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", context_length=64))
    cuda = Cuda(
        file, read_spec(file), slots=1, max_tokens=64, precision=Precision(element, WeightsFormat.FP8)
    )
    with closing(cuda.runner) as runner:
        assert runner.arithmetic.weights == f"fp8 in {element.value}"
