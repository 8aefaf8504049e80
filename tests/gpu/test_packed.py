"""Weights as they are in the file: by every kernel, products have the bits of those of elements."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.packed.packed_mma import PackedMma
from nightmill.worker.runners.gpu.products.packed.packed_rows import PackedRows
from nightmill.worker.runners.gpu.products.packed.unpack import Unpacked
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.shapes import (
    SUMMED,
    Candidate,
    Kind,
    Shape,
    first_sum,
    padded_rows,
)
from nightmill.worker.runners.gpu.weights.layout import weight_bytes
from nightmill.worker.runners.gpu.weights.repacker import Repacker
from nightmill.worker.runners.gpu.weights.staging import Staging
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import BLOCK, GREEDY, Chunk, Cuda, Pages, generate, logits_of
from tests.support.elements import BOTH_ELEMENTS, as_words, from_words, without_signs_of_zeros
from tests.support.family_models import Heads, Size
from tests.support.operands import all_products, buffer, elements, fetched, poisoned
from tests.support.packed_weights import packed, weights_of
from tests.support.quantised_models import Shape as ModelShape
from tests.support.quantised_models import write

Array = npt.NDArray[np.float32]
PACKED = [kept for kept in Format if kept.packed]
EACH_FORMAT = pytest.mark.parametrize("kept", PACKED, ids=lambda kept: kept.name)


def columns_of(kept: Format) -> tuple[int, ...]:
    """Some that fill packets, and if the type has them some that do not."""
    return (768, 224) if kept.step == 64 else (768, 256)


@BOTH_ELEMENTS
@EACH_FORMAT
def test_repacked_weights_are_the_files(device: Device, kept: Format) -> None:
    for columns in columns_of(kept):
        for parts in ([29], [13, 16, 11]):
            more, rows = 11, sum(parts) + 11
            raw, exact = weights_of(kept, sum(parts), columns, device.element)
            expected = as_words(np.concatenate([exact, np.zeros((more, columns))]), device.element)
            matrix = packed(device, kept, raw, columns, parts, more)
            unpacked = Unpacked(device, (rows + 1) * columns * 2, lambda shape: [])
            place = unpacked.unpack(matrix).address
            device.fill(place, 0xFF, (rows + 1) * columns * 2)
            unpacked.unpack(matrix)
            words = device.download(place, (rows + 1, columns), np.uint16)
            np.testing.assert_array_equal(
                *map(without_signs_of_zeros, (words[: len(raw)], expected[: len(raw)]))
            )
            assert not (words[len(raw) : -1] & 0x7FFF).any(), "rows behind the file's are not of zeros"
            assert (words[-1] == 0xFFFF).all(), "wrote past its rows"
            chosen = np.array([5, 0, rows - 1, -1, 8, rows], dtype=np.int32)
            out = poisoned(device, (len(chosen) + 1, columns), FLOAT)
            embedding = Embedding(device, rows, scale=3.0)
            embedding.embed(buffer(device, chosen), matrix, out, len(chosen))
            found = fetched(device, out)
            inside = (chosen >= 0) & (chosen < rows)
            table = from_words(expected, device.element).astype(np.float32)
            np.testing.assert_array_equal(
                found[:-1],
                np.where(inside[:, None], np.float32(3.0) * table[np.clip(chosen, 0, rows - 1)], 0),
            )
            assert np.isnan(found[-1]).all(), "wrote past its rows"


def test_a_packed_weight_beyond_half_is_noticed(device: Device) -> None:
    raw, _ = weights_of(Format.Q4_K, 8, 256)
    raw[3, :2] = np.array([60_000], dtype="<f2").view(np.uint8)
    matrix = Matrix(device.allocate(Format.Q4_K.bytes(8, 256)), 8, 256, Format.Q4_K)
    repacker = Repacker(device, Staging(device))
    repacker.load(raw.reshape(-1), matrix, 0)
    assert not repacker.fits()


def results_of(
    device: Device, ways: Sequence[Candidate], shape: Shape, x: Buffer, weight: Matrix, before: Array
) -> list[npt.NDArray[np.uint32]]:
    """The words that each way gives."""
    floats = shape.kind in (Kind.FLOAT, *SUMMED)
    y = poisoned(device, (shape.rows + 1, shape.outputs), FLOAT if floats else ELEMENT)
    found = []
    for candidate in ways:
        if floats:
            device.copy_in(y.address, before)
            device.synchronize()
        candidate.kernel(shape)(x, weight, y)
        words = device.download(
            y.address, (shape.rows + 1, shape.outputs), np.uint32 if floats else np.uint16
        )
        found.append(words[: shape.rows])
    device.free(y.address)
    return found


KINDS = (Kind.PLAIN, Kind.FLOAT, Kind.SWIGLU, Kind.GEGLU, Kind.RESIDUAL, Kind.ADDEND)
EACH_KIND = (Format.Q4_K, Format.Q8_0)  # elsewhere, a kind whose results are elements, and one of floats
ROWS = (1024, 1, 3, 8, 9, 16, 17, 40, 64, 65, 257)


@EACH_FORMAT
def test_products_have_the_bits_of_those_over_elements(device: Device, kept: Format) -> None:
    """By every way there is, among any number of rows; also by those on other GPUs than Hopper."""
    with all_products(device, kept) as products:
        gate_up = poisoned(device, (ROWS[0] + 1, 2 * 1152), ELEMENT)
        portable = [one(device, [kept], Activate(device), gate_up) for one in (PackedRows, PackedMma)]
        for index, kind in enumerate(KINDS if kept in EACH_KIND else (Kind.PLAIN, Kind.RESIDUAL)):
            outputs, inputs = ((520, 768), (1152, 1024), (896, 4352))[index % 3]
            if kept.step == 64 and index % 2:
                inputs += 32
            rows_of_weight = outputs * (2 if kind.activation else 1)
            raw, exact = weights_of(kept, rows_of_weight, inputs, device.element)
            weight = packed(device, kept, raw, inputs)
            plain = Matrix(elements(device, exact).address, rows_of_weight, inputs, device.element.format)
            rng = np.random.default_rng(index)
            held = elements(device, rng.standard_normal((ROWS[0], inputs)) / 64)
            before = rng.standard_normal((ROWS[0] + 1, outputs)).astype(np.float32)
            one_sum = kind not in SUMMED or first_sum(outputs, inputs) == inputs
            expected = None
            for rows in ROWS:
                shape = Shape(padded_rows(rows), outputs, inputs, kind, device.element.format)
                old = before[: shape.rows + 1]
                if expected is None:
                    library = products._candidates(shape)[:1]
                    expected = results_of(device, library, shape, held, plain, old)[0]
                shape = replace(shape, format=kept)
                ways = products._candidates(shape)
                assert ways
                if one_sum and outputs <= gate_up.shape[1] // 2:
                    ways += [way for one in portable for way in one.candidates(shape)]
                for way, words in zip(ways, results_of(device, ways, shape, held, weight, old), strict=True):
                    np.testing.assert_array_equal(
                        words[:rows], expected[:rows], err_msg=f"{kind} {rows} {outputs} {inputs} {way.name}"
                    )
            for address in (weight.address, plain.address, held.address):
                device.free(address)


HEAD_ROWS = (1, 8, 9, 16, 17, 64)
SMALL_MODELS = {
    Format.Q8_0: [
        *((Kind.FLOAT, 16_384, inputs, HEAD_ROWS) for inputs in (320, 512, 576, 640, 768, 960, 1024)),
        (Kind.FLOAT, 49_152, 576, (1, 16, 64)),
        (Kind.PLAIN, 1152, 896, (1, 8, 9, 16, 64)),
    ],
    Format.Q6_K: [(Kind.FLOAT, 16_384, inputs, HEAD_ROWS) for inputs in (512, 768, 1024)],
} | {
    kept: [
        (Kind.PLAIN, 960, 576, HEAD_ROWS),
        (Kind.RESIDUAL, 576, 576, HEAD_ROWS),
        (Kind.RESIDUAL, 576, 1536, HEAD_ROWS),
        (Kind.SWIGLU, 1536, 576, HEAD_ROWS),
        (Kind.GEGLU, 2048, 640, HEAD_ROWS),
        (Kind.ADDEND, 640, 2048, HEAD_ROWS),
    ]
    for kept in (Format.Q4_1, Format.Q5_0)
}  # fmt: skip
"""Products of small models, by format: kind, outputs, inputs, rows.

Blocks go through several tiles of a head, whose inputs are few turns of a relay, or whose inputs end in the
middle of a chunk."""


@pytest.mark.parametrize("kept", SMALL_MODELS, ids=lambda kept: kept.name)
def test_products_of_small_models_have_the_bits_of_those_over_elements(device: Device, kept: Format) -> None:
    with all_products(device, kept) as products:
        for kind, outputs, inputs, numbers in SMALL_MODELS[kept]:
            hold_to_elements(device, products, kept, kind, outputs, inputs, numbers)


def test_windows_of_a_long_input_give_the_same_bits(device: Device) -> None:
    """Few rows whose inputs do not fit in a block's memory at once."""
    for kept in (Format.Q4_K, Format.Q8_0):
        with all_products(device, kept) as products:
            hold_to_elements(device, products, kept, Kind.RESIDUAL, 3584, 18_944, (1, 4, 8, 17, 64))


def hold_to_elements(
    device: Device, products: Products, kept: Format, kind: Kind, outputs: int, inputs: int,
    numbers: Sequence[int],
) -> None:  # fmt: skip
    """Every way to multiply so many rows has the bits of the product over the same weights as elements."""
    rows_of_weight = outputs * (2 if kind.activation else 1)
    raw, exact = weights_of(kept, rows_of_weight, inputs, device.element)
    weight = packed(device, kept, raw, inputs)
    plain = Matrix(elements(device, exact).address, rows_of_weight, inputs, device.element.format)
    rng = np.random.default_rng(inputs)
    held = elements(device, rng.standard_normal((max(numbers), inputs)) / 64)
    before = rng.standard_normal((max(numbers) + 1, outputs)).astype(np.float32)
    for rows in numbers:
        shape = Shape(padded_rows(rows), outputs, inputs, kind, device.element.format)
        old = before[: shape.rows + 1]
        library = products._candidates(shape)[:1]
        (expected,) = results_of(device, library, shape, held, plain, old)
        shape = replace(shape, format=kept)
        ways = products._candidates(shape)
        assert ways
        for way, words in zip(ways, results_of(device, ways, shape, held, weight, old), strict=True):
            np.testing.assert_array_equal(
                words[:rows], expected[:rows], err_msg=f"{kind} {rows} {outputs} {inputs} {way.name}"
            )
    for address in (weight.address, plain.address, held.address):
        device.free(address)


@pytest.mark.parametrize("kind", [Kind.SWIGLU, Kind.GEGLU], ids=str)
def test_a_gate_and_what_it_multiplies_may_be_of_different_types(device: Device, kind: Kind) -> None:
    """They are no runs of outputs: kernels that take one part after the other would go past both."""
    gate, up, ffn, inputs = Format.Q4_K, Format.Q6_K, 1024, 768
    numbers = (1, 8, 9, 16, 17, 64)
    with all_products(device, gate, up) as products:
        made, exact = [], []
        for kept in (gate, up):
            raw, floats = weights_of(kept, ffn, inputs, device.element)
            made.append(packed(device, kept, raw, inputs))
            exact.append(floats)
        mixed = Matrix(made[0].address, 2 * ffn, inputs, Format.MIXED, parts=tuple(made))
        joined = elements(device, np.concatenate(exact))
        plain = Matrix(joined.address, 2 * ffn, inputs, device.element.format)
        held = elements(device, np.random.default_rng(3).standard_normal((max(numbers), inputs)) / 64)
        for rows in numbers:
            shape = Shape(padded_rows(rows), ffn, inputs, kind, device.element.format)
            old = np.zeros((1, 1), dtype=np.float32)
            (expected,) = results_of(device, products._candidates(shape)[:1], shape, held, plain, old)
            shape = replace(shape, format=Format.MIXED)
            ways = products._candidates(shape)
            assert ways
            for way, words in zip(ways, results_of(device, ways, shape, held, mixed, old), strict=True):
                np.testing.assert_array_equal(words[:rows], expected[:rows], err_msg=f"{rows} {way.name}")


def test_logits_that_go_through_the_room_in_pieces_have_the_same_bits(device: Device) -> None:
    outputs, inputs, kept = 1000, 768, Format.Q4_K
    raw, exact = weights_of(kept, outputs, inputs, device.element)
    weight = packed(device, kept, raw, inputs)
    plain = Matrix(elements(device, exact).address, outputs, inputs, device.element.format)
    held = elements(device, np.random.default_rng(0).standard_normal((64, inputs)) / 64)
    with all_products(device) as products:
        in_pieces = Unpacked(device, 300 * inputs * 2, products._candidates)
        for rows in (64, 1):
            shape = Shape(rows, outputs, inputs, Kind.FLOAT, device.element.format)
            old = np.zeros((rows + 1, outputs), dtype=np.float32)
            (expected,) = results_of(device, products._candidates(shape)[:1], shape, held, plain, old)
            shape = replace(shape, format=kept)
            ways = in_pieces.candidates(shape)
            assert ways
            for words in results_of(device, ways, shape, held, weight, old):
                np.testing.assert_array_equal(words, expected)


SMALL = Size(layers=4, vocab=603, context=512, heads=Heads(4, 2, 64), width=256, ffn=512)
SLOTS, CONTEXT = 6, 256
IN_FILE = Precision(weights=WeightsFormat.FILE)


@pytest.mark.parametrize("name", [*(kept.name for kept in PACKED), "Q4_K_M"])
def test_a_model_as_in_the_file_has_the_same_bits_by_way_of_elements(name: str, tmp_path: Path) -> None:
    """Prompts, chunks of prompts beside drawn tokens, a few sequences and one."""
    tied = len(name) % 2 == 0
    file = GgufFile.open(
        write(tmp_path / "model.gguf", ModelShape(SMALL, tied=tied), name, pool_bytes=1 << 20)
    )
    spec = read_spec(file)
    texts = np.random.default_rng(1).integers(0, spec.vocab, (SLOTS, 200)).tolist()
    steps = [[Chunk(s, texts[s], 0, 20 + 17 * s, 5) for s in range(4)]]
    steps += [[Chunk(0, texts[0], 20, 1, 1, True), Chunk(4, texts[4], 0, 170, 3), Chunk(5, texts[5], 0, 1)]]
    steps += [[Chunk(s, texts[s], 20 + 17 * s + (s == 0), 1, 1, True) for s in range(4)]]
    steps += [[Chunk(s, texts[s], p, 1, 1, True) for s, p in ((0, 22), (1, 38))]]
    found = []
    for precision in (replace(IN_FILE, plain_products=True), IN_FILE):
        cuda = Cuda(
            file, spec, slots=SLOTS, kv_pages=SLOTS * CONTEXT // BLOCK, max_tokens=512, max_draws=512,
            context=CONTEXT, tune=False, precision=precision,
        )  # fmt: skip
        pages = Pages(SLOTS, CONTEXT // BLOCK)
        with closing(cuda.runner):
            found.append([logits_of(cuda, pages, step, admit=at < 2) for at, step in enumerate(steps)])
            sizes = cuda.runner.memory.weights
    assert sizes == weight_bytes(spec, IN_FILE)
    assert sizes < 1.03 * sum(file.raw(tensor).nbytes for tensor in file.tensors) + 256 * len(file.tensors)
    for step, (plain, kept) in enumerate(zip(*found, strict=True)):
        np.testing.assert_array_equal(kept.view(np.uint32), plain.view(np.uint32), err_msg=f"step {step}")


def test_tuned_products_and_graphs_give_the_same_tokens_by_way_of_elements(tmp_path: Path) -> None:
    file = GgufFile.open(write(tmp_path / "model.gguf", ModelShape(SMALL), "Q4_K_M", pool_bytes=1 << 20))
    spec = read_spec(file)
    rng = np.random.default_rng(2)
    prompts = [tuple(rng.integers(0, spec.vocab, length).tolist()) for length in (1, 2, 17, 40, 100, 5)]
    requests = [Request(str(number), 1, prompt, GREEDY, seed=0) for number, prompt in enumerate(prompts)]
    found = []
    for precision in (replace(IN_FILE, plain_products=True), IN_FILE):
        runner = cuda_runner(
            file, spec, slots=SLOTS, kv_pages=SLOTS * CONTEXT // BLOCK, max_tokens=512, context=CONTEXT,
            precision=precision,
        )  # fmt: skip
        with closing(runner):
            found.append(generate(runner, requests, context=CONTEXT, token_budget=256))
            found.append(generate(runner, requests[:2], context=CONTEXT, token_budget=7))
    assert found[0] == found[2]
    assert found[1] == found[3]
