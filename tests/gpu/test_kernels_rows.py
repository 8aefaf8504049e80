"""Embedding, gathers, norms, sums, and activations against the reference's operations in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.model.spec import Activation, LayerInputs, Norm
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, Format
from nightmill.worker.runners.gpu.products.fp8.quantise import Quantise
from nightmill.worker.runners.gpu.rows.activate import COMPUTED, Activate
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.rows.layer_inputs import LayerInputRows
from nightmill.worker.runners.gpu.rows.logits import LogitScale
from nightmill.worker.runners.gpu.rows.norms import Ending, Norms
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, NormWeight
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.rounding import to_fp8
from tests.gpu.oracles import ATTENTION, EXACT, assert_close
from tests.support import packed_weights
from tests.support.elements import BOTH_ELEMENTS, PRECISION, ROUNDED_ONCE, rounded
from tests.support.operands import (
    buffer,
    elements,
    fetched,
    fetched_fp8,
    fp8_room,
    matrix,
    poisoned,
)  # fmt: skip
from tests.support.specs import VARIANTS, dense_spec

ROWS = (1, 7, 63, 65, 1000)
CONTEXT = 40_000
Array = npt.NDArray[Any]


@BOTH_ELEMENTS
def test_embedding_rows_are_the_tables(device: Device) -> None:
    spec = dense_spec(vocab=1003)
    embedding = Embedding(device, spec.vocab)
    rng = np.random.default_rng(1)
    table = rounded(rng.standard_normal((spec.vocab, spec.width)), device.element)
    weights = matrix(device, table)
    for count in ROWS:
        tokens = rng.integers(0, spec.vocab, count, dtype=np.int32)
        tokens[0] = spec.vocab - 1
        out = poisoned(device, (count, spec.width), np.float32)
        embedding.embed(buffer(device, tokens), weights, out, count)
        expected = ops.embedding(table, tokens).astype(np.float32)
        np.testing.assert_array_equal(fetched(device, out), expected)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_gathered_rows_are_the_rows(device: Device, kind: type) -> None:
    embedding = Embedding(device, 1000)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1000, 904)).astype(kind)
    held = buffer(device, x)
    for count in ROWS:
        rows = rng.integers(0, 1000, count, dtype=np.int32)
        out = poisoned(device, (count, 904), kind)
        embedding.gather_rows(held, device.upload(rows), out, count)
        np.testing.assert_array_equal(fetched(device, out), x[rows])


NORMS = {
    "none": None,
    "RMS": Norm(1e-6),
    "RMS, bias": Norm(1e-6, bias=True),
    "centred": Norm(1e-5, centred=True),
    "centred, bias": Norm(1e-5, centred=True, bias=True),
}
LONG_WIDTHS = (18_944, 40_000)
WIDTHS = (8, 64, 896, 1024, 2056, 3584, 4096, 8192, 12288)


class Normed:
    """A norm of rows of `width` with random weights: for kernels, and in float64."""

    def __init__(self, device: Device, norm: Norm | None, width: int, rng: np.random.Generator) -> None:
        self._norm = norm
        self._weight, self._bias = rng.standard_normal((2, width)).astype(np.float32)
        self.weight = NO_NORM
        if norm is not None:
            bias = buffer(device, self._bias) if norm.bias else ABSENT
            self.weight = NormWeight(buffer(device, self._weight), norm.eps, norm.centred, bias)

    def of(self, x: Array) -> Array:
        x, norm = x.astype(np.float64), self._norm
        if norm is None:
            return x
        normed = (ops.layer_norm if norm.centred else ops.rms_norm)(x, self._weight, norm.eps)
        return normed + self._bias if norm.bias else normed


def rows_of_all_sizes(rng: np.random.Generator, count: int, width: int) -> Array:
    """Floats whose rows differ much in size, and have a mean."""
    scale = rng.uniform(0.01, 100, (count, 1))
    return ((rng.standard_normal((count, width)) + 0.5) * scale).astype(np.float32)


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(device: Device, kind: str, width: int) -> None:
    norms = Norms(device, VARIANTS["LayerNorm, no gate, biases"])
    rng = np.random.default_rng(width)
    norm = Normed(device, NORMS[kind], width, rng)
    for count in ROWS if width < 4096 else (1, 65):
        x = rows_of_all_sizes(rng, count, width)
        held, out = buffer(device, x), poisoned(device, (count + 1, width), ELEMENT)
        norms(held, norm.weight, out, count)
        actual = fetched(device, out)
        assert_close(actual[:count], norm.of(x), ROUNDED_ONCE[device.element])
        assert np.isnan(actual[count]).all()
        np.testing.assert_array_equal(fetched(device, held), x)


@BOTH_ELEMENTS
def test_either_kernel_gives_the_bits_of_an_rms_norm(device: Device) -> None:
    norms = Norms(device, VARIANTS["norms after too"])
    rng = np.random.default_rng(5)
    for width in WIDTHS:
        weight = Normed(device, Norm(1e-6), width, rng).weight
        x = buffer(device, rows_of_all_sizes(rng, 9, width))
        outs = [poisoned(device, (9, width), ELEMENT) for _ in range(2)]
        norms(x, weight, outs[0], 9)
        norms.add(None, ABSENT, Ending(before=weight), x, outs[1], 9)
        np.testing.assert_array_equal(*(fetched(device, out) for out in outs))


def test_rows_are_rounded_to_fp8(device: Device) -> None:
    quantise = Quantise(device)
    rng = np.random.default_rng(6)
    for width in (*WIDTHS, *LONG_WIDTHS):
        x = rounded(rows_of_all_sizes(rng, 5, width), device.element)
        x[1], x[2, 0], x[3, ::7] = 0, np.nan, np.inf
        held, out = elements(device, x), fp8_room(device, 6, width)
        quantise(held.address, out.address, out.scales, 5, width)
        numbers, scales = fetched_fp8(device, out, (6, width))
        with np.errstate(invalid="ignore"):
            expected = to_fp8(x.astype(np.float32))
        np.testing.assert_array_equal(numbers[:5], expected[0])
        np.testing.assert_array_equal(scales[:5], expected[1])
        assert np.isnan(numbers[5]).all() and np.isnan(scales[5])


@BOTH_ELEMENTS
def test_an_rms_norm_rounds_to_fp8_what_it_would_give(device: Device) -> None:
    norms = Norms(device, dense_spec())
    rng = np.random.default_rng(7)
    for width in WIDTHS:
        weight = Normed(device, Norm(1e-6), width, rng).weight
        x = buffer(device, rows_of_all_sizes(rng, 7, width))
        out, given = fp8_room(device, 8, width), poisoned(device, (7, width), ELEMENT)
        norms(x, weight, out, 7)
        norms(x, weight, given, 7)
        numbers, scales = fetched_fp8(device, out, (8, width))
        expected = to_fp8(fetched(device, given).astype(np.float32))
        np.testing.assert_array_equal(numbers[:7], expected[0])
        np.testing.assert_array_equal(scales[:7], expected[1])
        assert np.isnan(numbers[7]).all() and np.isnan(scales[7])


@BOTH_ELEMENTS
@pytest.mark.parametrize("before", [*NORMS, "nothing"])
@pytest.mark.parametrize("after", NORMS)
@pytest.mark.parametrize("width", [8, 904, 2056, 4104, 12288])
def test_what_a_product_gives_is_normed_scaled_added_and_normed_again(
    device: Device, after: str, before: str, width: int
) -> None:
    norms = Norms(device, VARIANTS["norms after too"])
    rng = np.random.default_rng(width)
    first = Normed(device, NORMS[after], width, rng)
    second = Normed(device, NORMS.get(before), width, rng)
    bias = rng.standard_normal(width).astype(np.float32)
    cases = ((1, 1.0, False, 0.0), (7, 0.22, True, 0.0), (66, 1.0, True, 0.0), (5, 1.0, False, 0.3))
    for count, scale, biased, factor in cases:
        times = buffer(device, np.full(1, factor, dtype=np.float32)) if factor else ABSENT
        then = None if before == "nothing" else second.weight
        ending = Ending(first.weight, scale, times, then)
        added, x = (rows_of_all_sizes(rng, count, width) for _ in range(2))
        held, out = buffer(device, np.vstack([x, x[:1]])), poisoned(device, (count, width), ELEMENT)
        norms.add(buffer(device, added), buffer(device, bias) if biased else ABSENT, ending, held, out, count)
        total = x + scale * first.of(added.astype(np.float64) + biased * bias)
        total *= factor or 1.0
        actual = fetched(device, held)
        np.testing.assert_array_equal(actual[count], x[0])
        assert_close(actual[:count], total, EXACT)
        if before == "nothing":
            assert np.isnan(fetched(device, out)).all()
        else:
            assert_close(fetched(device, out), second.of(total), ROUNDED_ONCE[device.element])


@BOTH_ELEMENTS
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("activation", sorted(COMPUTED))
@pytest.mark.parametrize("ffn", [8, 1000, 4864])
def test_activations(device: Device, ffn: int, activation: Activation, gated: bool, bias: bool) -> None:
    activate = Activate(device)
    rng = np.random.default_rng(ffn)
    width = 2 * ffn if gated else ffn
    oracle = {
        (Activation.SILU, True): ops.swiglu, (Activation.SILU, False): ops.silu,
        (Activation.GELU, True): ops.geglu, (Activation.GELU, False): ops.gelu,
        (Activation.GELU_ERF, True): ops.geglu_erf, (Activation.GELU_ERF, False): ops.gelu_erf,
        (Activation.RELU_SQUARED, True): ops.reglu_squared,
        (Activation.RELU_SQUARED, False): ops.relu_squared,
    }[activation, gated]  # fmt: skip
    more = rng.standard_normal(width).astype(np.float32) * bias
    more[-ffn] = 0
    for count in ROWS:
        inner = rounded(rng.standard_normal((count, width)) * 4, device.element)
        end = 224 if activation is Activation.RELU_SQUARED else 57344
        inner[0, 0], inner[-1, ffn - 1] = end, -end  # the ends of the activation
        if gated:
            inner[0, ffn] = 0.5
        out = poisoned(device, (count + 1, ffn), ELEMENT)
        activate(
            elements(device, inner), out, count, activation, gated=gated,
            bias=buffer(device, more) if bias else ABSENT,
        )  # fmt: skip
        expected = oracle(inner.astype(np.float64) + more)
        actual = fetched(device, out)
        assert np.isnan(actual[count]).all()
        np.testing.assert_allclose(actual[0, 0], expected[0, 0], rtol=2 * PRECISION[device.element])
        assert actual[count - 1, ffn - 1] == 0
        actual[0, 0] = expected[0, 0] = 0
        assert_close(actual[:count, 1:], expected[:, 1:], ROUNDED_ONCE[device.element])


@BOTH_ELEMENTS
@pytest.mark.parametrize("width", [8, 1000, 4096])
def test_gates_are_opened(device: Device, width: int) -> None:
    activate, rng = Activate(device), np.random.default_rng(width)
    for count in ROWS:
        mixed = rounded(rng.standard_normal((count, width)) * 4, device.element)
        gates = rounded(rng.standard_normal((count, width)) * 4, device.element)
        gates[0, 0], gates[-1, width - 1] = 57344, -57344
        out = elements(device, np.concatenate([mixed, np.full((1, width), np.nan)]))
        activate.open_gates(out, elements(device, gates), count)
        actual, expected = fetched(device, out), mixed / (1 + np.exp(-gates.astype(np.float64)))
        assert np.isnan(actual[count]).all()
        assert_close(actual[:count], expected, ROUNDED_ONCE[device.element])


@pytest.mark.parametrize(("scale", "cap"), [(0.125, None), (1.0, 30.0), (0.25, 2.0)])
def test_logits_are_scaled_and_capped(device: Device, scale: float, cap: float | None) -> None:
    logit_scale = LogitScale(device, replace(dense_spec(), logit_scale=scale, logit_softcap=cap))
    rng = np.random.default_rng(3)
    for count in (1, 7, 130):
        logits = (rng.standard_normal((count, 1003 + 5)) * 40).astype(np.float32)
        held = buffer(device, np.vstack([logits, logits[:1]]))
        logit_scale(held, count)
        actual = fetched(device, held)
        assert_close(actual[:count], ops.softcap(logits.astype(np.float64) * scale, cap), 1e-12)
        np.testing.assert_array_equal(actual[count], logits[0])


def test_suppressed_logits_are_never_the_largest(device: Device) -> None:
    """Also where logits are capped, which comes first."""
    rng = np.random.default_rng(4)
    for cap in (None, 3.0):
        suppress = LogitScale(device, replace(dense_spec(), logit_softcap=cap, suppressed=(0, 5, 999)))
        for count in (1, 130):
            logits = rng.standard_normal((count + 1, 1008)).astype(np.float32)
            held, expected = buffer(device, logits), ops.softcap(logits.astype(np.float64), cap)
            expected[:, [0, 5, 999]] = -np.inf
            suppress(held, count)
            actual = fetched(device, held)
            np.testing.assert_array_equal(np.isinf(actual[:count]), np.isinf(expected[:count]))
            np.testing.assert_allclose(actual[:count], expected[:count], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(actual[count], logits[count])


@BOTH_ELEMENTS
@pytest.mark.parametrize("kept", [None, *(kept for kept in Format if kept.packed)], ids=str)
def test_layers_inputs_are_made_of_two_embeddings(device: Device, kept: Format | None) -> None:
    """The table is elements, or packed: of it only the tokens' rows are unpacked."""
    layers, width, vocab = 8, 96, 50
    inputs = LayerInputs(width=width, norm=Norm(1e-5))
    plain = dense_spec(vocab=vocab, layers=layers, width=64)
    spec = replace(plain, layers=tuple(replace(one, inputs=inputs) for one in plain.layers))
    launcher, rng = LayerInputRows(device, spec), np.random.default_rng(2)
    gain = rng.standard_normal(width).astype(np.float32)
    norm = NormWeight(buffer(device, gain), 1e-5)
    if kept is None:
        numbers = rounded(rng.standard_normal((vocab, layers * width)), device.element)
        table = matrix(device, numbers)
    else:
        raw, numbers = packed_weights.weights_of(kept, vocab, layers * width)
        table = packed_weights.packed(device, kept, raw, layers * width)
        numbers = rounded(numbers, device.element)
    for count in (1, 7, 65):
        tokens = rng.integers(0, vocab, count, dtype=np.int32)
        tokens[count // 2] = vocab if count > 1 else tokens[0]
        made = rounded(8 * rng.standard_normal((count, layers, width)), device.element)
        held = elements(device, np.concatenate([made, made[:1]]))
        launcher.make(buffer(device, tokens), table, held, norm, count)
        exact = ops.rms_norm(made.astype(np.float64) * 64**-0.5, gain, 1e-5)
        looked_up = np.concatenate([numbers, np.zeros_like(numbers[:1])])[tokens]
        exact += looked_up.reshape(exact.shape).astype(np.float64) * np.sqrt(width)
        exact *= 2**-0.5
        actual = fetched(device, held)
        assert_close(actual[:count], exact, ROUNDED_ONCE[device.element])
        np.testing.assert_array_equal(actual[count], made[0])
        for layer, taken in ((0, None), (layers - 1, rng.permutation(count)[: -(-count // 2)])):
            rows = np.arange(count) if taken is None else taken
            gate = rounded(2 * rng.standard_normal((len(rows) + 1, width)), device.element)
            opened = elements(device, gate)
            indices = 0 if taken is None else device.upload(taken.astype(np.int32))
            launcher.gate(opened, held, layer, len(rows), indices)
            by = ops.gelu(gate.astype(np.float64)[:-1]) * actual[rows, layer].astype(np.float64)
            found = fetched(device, opened)
            assert_close(found[:-1], by, ROUNDED_ONCE[device.element])
            np.testing.assert_array_equal(found[-1], gate[-1])


@BOTH_ELEMENTS
def test_embeddings_are_scaled(device: Device) -> None:
    spec = dense_spec(vocab=100)
    rng = np.random.default_rng(8)
    table = rounded(rng.standard_normal((spec.vocab, spec.width)), device.element)
    tokens = rng.integers(0, spec.vocab, 65, dtype=np.int32)
    out = poisoned(device, (65, spec.width), np.float32)
    Embedding(device, spec.vocab, 12.5).embed(buffer(device, tokens), matrix(device, table), out, 65)
    np.testing.assert_array_equal(fetched(device, out), table[tokens].astype(np.float32) * np.float32(12.5))


def test_a_fault_of_one_percent_is_noticed() -> None:
    rng = np.random.default_rng(0)
    right = rng.standard_normal((65, 896))
    assert_close(right.astype(np.float16), right, EXACT)
    for limit in (*ROUNDED_ONCE.values(), ATTENTION):
        with pytest.raises(AssertionError):
            assert_close(right * 1.01, right, limit)
        wrong = right.copy()
        wrong[3] *= 1.05  # one row alone
        with pytest.raises(AssertionError):
            assert_close(wrong, right, limit)
        wrong[3, 5] = np.nan
        with pytest.raises(AssertionError):
            assert_close(wrong, right, limit)
