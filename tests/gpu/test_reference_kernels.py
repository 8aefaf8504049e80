"""The readable kernels against float64, and the fast ones of each family against them.

What only needs a device runs without a GPU too (`tests/unit/runners/test_references_on_host.py`).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import Norm
from nightmill.worker.runners.base import NOT_A_NUMBER
from nightmill.worker.runners.gpu.attention.choice import decode_attention, prefill_attention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.latent import as_attention, latent_decode, latent_prefill
from nightmill.worker.runners.gpu.attention.prefill import PortablePrefill
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Format
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.products.fp8.format import Fp8Format
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.shapes import Kind, Shape
from nightmill.worker.runners.reference import ops
from tests.gpu import sampling_trials as sampling
from tests.gpu.attending import make_sinks, run_decode, run_prefill
from tests.gpu.latents import make_absorbed, make_latents, run_latent_decode, run_latent_prefill
from tests.gpu.oracles import ATTENTION, LONG, attention_of, make_paged, make_queries, nmse
from tests.gpu.test_fp8 import Rows
from tests.gpu.test_kernels_rows import Normed, rows_of_all_sizes
from tests.support.cuda_runners import need_fp8
from tests.support.elements import BOTH_ELEMENTS, ROUNDED_ONCE, rounded
from tests.support.operands import (
    all_products,
    buffer,
    cache_of,
    elements,
    fetched,
    fp8_room,
    layer_of_heads,
    matrix,
    poisoned,
    room,
)
from tests.support.packed_weights import packed, weights_of
from tests.support.parts import latent_of
from tests.support.reference_kernels import (
    QkvOperands,
    ReferenceProducts,
    ReferenceSampler,
    reference_rms_norm,
    reference_rope,
)
from tests.support.specs import VARIANTS, dense_spec

ROWS, OUTPUTS, INPUTS = 65, 520, 896
CONTEXT = 100
FLOATS = 1e-10
"""NMSE allowed to sums in float."""
FORMATS = [kept for kept in Format if kept.packed]


def products_are_exact(device: Device, rows: int, outputs: int, inputs: int) -> None:
    """Of elements, of each kind; poison is behind all rows."""
    rng = np.random.default_rng(1)
    values = rounded(rng.standard_normal((rows, inputs)), device.element)
    weights = rounded(rng.standard_normal((2 * outputs, inputs)) / np.sqrt(inputs), device.element)
    x, weight, reference = elements(device, values), matrix(device, weights), ReferenceProducts(device)
    exact = values.astype(np.float64) @ weights.astype(np.float64).T
    before = np.full((rows + 1, 2 * outputs), np.nan, dtype=np.float32)
    for kind in (Kind.FLOAT, Kind.RESIDUAL):
        before[:rows] = np.nan if kind is Kind.FLOAT else 3
        y = buffer(device, before)
        reference(x, weight, y, rows, kind)
        found = fetched(device, y)
        assert nmse(found[:rows], exact + (kind is Kind.RESIDUAL) * 3) < FLOATS
        assert np.isnan(found[rows]).all(), "wrote past its rows"
    y = poisoned(device, (rows + 1, outputs), ELEMENT)
    reference(x, weight, y, rows, Kind.SWIGLU)
    found = fetched(device, y)
    expected = ops.swiglu(rounded(exact, device.element).astype(np.float64))
    assert nmse(found[:rows], expected) < 4 * ROUNDED_ONCE[device.element]
    assert np.isnan(found[rows]).all(), "wrote past its rows"


def norms_are_exact(device: Device, rows: int, width: int) -> None:
    rng = np.random.default_rng(2)
    norm = Normed(device, Norm(1e-6), width, rng)
    x = rows_of_all_sizes(rng, rows, width)
    out = poisoned(device, (rows + 1, width), ELEMENT)
    reference_rms_norm(device, buffer(device, x), norm.weight.weight, out, rows, 1e-6)
    found = fetched(device, out)
    assert nmse(found[:rows], norm.of(x)) < ROUNDED_ONCE[device.element]
    assert np.isnan(found[rows]).all(), "wrote past its rows"


class Heads:
    """Random heads of a model with a bias and norms: for kernels, and in float64 as they are to become."""

    def __init__(self, device: Device, style: RopeStyle, rows: int) -> None:
        spec = dense_spec(heads=3, kv_heads=1, head_dim=64, style=style, qk_norm=True)
        self.attention = attention = spec.layers[0].attention
        norm = attention.qk_norm
        assert norm is not None
        rng = np.random.default_rng(9)
        qkv = rounded(rng.standard_normal((rows, 5, 64)), device.element)
        bias, (q_norm, k_norm) = rng.standard_normal(5 * 64), rng.standard_normal((2, 64))
        self.positions = rng.integers(0, CONTEXT, rows, dtype=np.int32)
        rope, everywhere = attention.rope, np.arange(CONTEXT)
        table = ops.rope_table(everywhere, rope.frequencies(), rope.magnitude, np.float32)
        added, of_q, of_k = (buffer(device, one.astype(np.float32)) for one in (bias, q_norm, k_norm))
        places, angles_of = buffer(device, self.positions), buffer(device, np.stack(table, axis=-1))
        self.given = QkvOperands(elements(device, qkv), added, of_q, of_k, places, angles_of)
        exact = qkv.astype(np.float64) + bias.astype(np.float32).reshape(5, 64)
        angles = ops.rope_table(self.positions, rope.frequencies(), rope.magnitude, np.float64)
        for part, gain in ((slice(3), q_norm), (slice(3, 4), k_norm)):
            normed = ops.rms_norm(exact[:, part], gain.astype(np.float32), norm.eps)
            exact[:, part] = ops.rope(normed, *angles, interleaved=style is RopeStyle.PAIRS)
        self.exact = exact


def heads_are_exact(device: Device, rows: int) -> None:
    for style in RopeStyle:
        heads = Heads(device, style, rows)
        out = poisoned(device, (rows + 1, 5, 64), FLOAT)
        reference_rope(device, heads.attention, heads.given, out)
        found = fetched(device, out)
        assert nmse(found[:rows], heads.exact) < FLOATS
        assert np.isnan(found[rows]).all(), "wrote past its rows"


def fp8_products_are_exact(device: Device, rows: int, outputs: int, inputs: int) -> None:
    rng = np.random.default_rng(3)
    x, weight = Rows(device, rows, inputs, rng), Rows(device, outputs, inputs, rng)
    y = poisoned(device, (rows + 1, outputs), FLOAT)
    ReferenceProducts(device)(x.buffer, weight.matrix, y, rows)
    found = fetched(device, y)
    assert nmse(found[:rows], x.exact @ weight.exact.T) < FLOATS
    assert np.isnan(found[rows]).all(), "wrote past its rows"


def draws_are_the_definition_s(device: Device, count: int, vocab: int) -> None:
    """Compare greedy and random draws, with each filter and all of them, penalties, and a row of NaN."""
    sampler: Any = ReferenceSampler(device, vocab)
    rng = np.random.default_rng(vocab)
    for change in (sampling.greedy, sampling.plain, sampling.top_k, sampling.top_p, sampling.everything):
        rows = sampling.make_rows(rng, count)
        rows.parameters["temperature"] = rng.choice([0.0, 0.7, 1.0], count)
        change(rng, rows)
        sampling.penalise_some(rng, rows, vocab)
        logits = sampling.random_logits(rng, count, vocab)
        logits[::2] = rng.choice([0, -1, -2], logits[::2].shape, p=[0.02, 0.28, 0.7])  # equals
        sampling.check(device, sampler, logits, rows)
        logits[::3, vocab // 2] = np.nan
        assert (sampling.draw(device, sampler, logits, rows)[::3] == NOT_A_NUMBER).all()


@BOTH_ELEMENTS
def test_reference_kernels_are_exact(device: Device) -> None:
    products_are_exact(device, ROWS, OUTPUTS, INPUTS)
    norms_are_exact(device, ROWS, INPUTS)
    heads_are_exact(device, ROWS)
    fp8_products_are_exact(device, ROWS, OUTPUTS, INPUTS)
    draws_are_the_definition_s(device, 33, 1003)


@BOTH_ELEMENTS
def test_products_of_elements_are_those_of_the_reference(device: Device) -> None:
    rng = np.random.default_rng(4)
    x = elements(device, rng.standard_normal((72, INPUTS)))
    weight = matrix(device, rng.standard_normal((2 * OUTPUTS, INPUTS)) / np.sqrt(INPUTS))
    with all_products(device) as products:
        for kind in (Kind.FLOAT, Kind.RESIDUAL, Kind.SWIGLU):
            outputs = OUTPUTS if kind is Kind.SWIGLU else 2 * OUTPUTS
            fast, slow = (
                room(device, (72, outputs), ELEMENT)
                if kind is Kind.SWIGLU
                else buffer(device, np.ones((72, outputs), dtype=np.float32))
                for _ in range(2)
            )
            products.of(kind, outputs, INPUTS)(x, weight, fast, ROWS)
            ReferenceProducts(device)(x, weight, slow, ROWS, kind)
            limit = ROUNDED_ONCE[device.element] if kind is Kind.SWIGLU else FLOATS
            assert nmse(fetched(device, fast, ROWS), fetched(device, slow, ROWS)) < limit


@BOTH_ELEMENTS
@pytest.mark.parametrize("kept", FORMATS, ids=lambda kept: kept.name)
def test_products_of_packed_weights_are_those_of_the_reference(device: Device, kept: Format) -> None:
    raw, _ = weights_of(kept, OUTPUTS, 768)
    weight = packed(device, kept, raw, 768)
    x = elements(device, np.random.default_rng(5).standard_normal((72, 768)))
    fast, slow = (room(device, (72, OUTPUTS), FLOAT) for _ in range(2))
    with all_products(device, kept) as products:
        products.of(Kind.FLOAT, OUTPUTS, 768, kept)(x, weight, fast, ROWS)
    ReferenceProducts(device)(x, weight, slow, ROWS)
    assert nmse(fetched(device, fast, ROWS), fetched(device, slow, ROWS)) < FLOATS


def test_products_of_fp8_are_those_of_the_reference(device: Device) -> None:
    need_fp8()
    rng = np.random.default_rng(6)
    x, weight = Rows(device, ROWS, INPUTS, rng), Rows(device, OUTPUTS, INPUTS, rng)
    fast, slow = (room(device, (ROWS, OUTPUTS), FLOAT) for _ in range(2))
    products: Any = Fp8Format().launcher(device, [Kind.ADDEND], fp8_room(device, 0, 0))
    shape = Shape(ROWS, OUTPUTS, INPUTS, Kind.ADDEND, Format.FP8)
    products.candidates(shape)[0].kernel(shape)(x.buffer, weight.matrix, fast)
    ReferenceProducts(device)(x.buffer, weight.matrix, slow, ROWS)
    assert nmse(fetched(device, fast), fetched(device, slow)) < 1e-6  # tensor cores sum with fewer bits


@BOTH_ELEMENTS
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("shape", [(14, 2, 64), (8, 4, 256)])
def test_attention_is_that_of_the_reference(device: Device, shape: tuple[int, int, int], sinks: bool) -> None:
    """`attention_any.cu`: of drawn tokens, and of prompts, each token as one that was drawn."""
    attention, rng = attention_of(shape, sinks=sinks), np.random.default_rng(7)
    lengths, chunks = [17, 300, 1025], [17, 64, 200]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, sum(chunks), attention, device.element)
    paged.sinks = make_sinks(rng, attention) if sinks else None
    reference = GeneralDecode(device, attention)
    decode = decode_attention(device, attention, max_context=LONG)
    drawn = [run_decode(device, one, attention, qkv[:3], paged, lengths) for one in (decode, reference)]
    assert nmse(*drawn) < ATTENTION
    prefill = prefill_attention(device, attention)
    fast = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks)
    alone = replace(paged, keys=[], values=[], tables=np.repeat(paged.tables, chunks, axis=0))
    before = np.repeat(np.array(lengths) - chunks, chunks)
    contexts = (before + np.concatenate([np.arange(chunk) + 1 for chunk in chunks])).tolist()
    assert nmse(fast, run_decode(device, reference, attention, qkv, alone, contexts)) < ATTENTION


@BOTH_ELEMENTS
def test_latent_attention_is_that_of_the_reference(device: Device) -> None:
    attention, rng = latent_of(20), np.random.default_rng(9)
    lengths, chunks = [17, 300, 700], [17, 64, 100]
    paged = make_latents(rng, device, attention, lengths)
    queries = make_absorbed(rng, device, attention, sum(chunks))
    slow = as_attention(attention), attention.latent
    decodes = latent_decode(device, attention, max_context=LONG), GeneralDecode(device, *slow)
    case = attention, queries[:3], paged, lengths
    assert nmse(*(run_latent_decode(device, one, *case) for one in decodes)) < ATTENTION
    prefills = latent_prefill(device, attention), PortablePrefill(device, *slow)
    whole = attention, queries, paged, lengths, chunks
    assert nmse(*(run_latent_prefill(device, one, *whole) for one in prefills)) < ATTENTION


@BOTH_ELEMENTS
def test_rms_norms_are_those_of_the_reference(device: Device) -> None:
    rng = np.random.default_rng(8)
    norm = Normed(device, Norm(1e-6), INPUTS, rng)
    x = buffer(device, rows_of_all_sizes(rng, ROWS, INPUTS))
    fast, slow = (poisoned(device, (ROWS, INPUTS), ELEMENT) for _ in range(2))
    Norms(device, VARIANTS["norms after too"])(x, norm.weight, fast, ROWS)
    reference_rms_norm(device, x, norm.weight.weight, slow, ROWS, 1e-6)
    assert nmse(fetched(device, fast), fetched(device, slow)) < ROUNDED_ONCE[device.element]


@BOTH_ELEMENTS
@pytest.mark.parametrize("style", RopeStyle)
def test_heads_are_those_of_the_reference(device: Device, style: RopeStyle) -> None:
    """Queries in place, keys and values in pages."""
    heads = Heads(device, style, ROWS)
    given, attention = heads.given, heads.attention
    slow = poisoned(device, (ROWS, 5, 64), FLOAT)
    reference_rope(device, attention, given, slow)
    expected = fetched(device, slow)
    pages = -(-ROWS // PAGE)
    poison = np.full((pages, 1, PAGE, 64), np.nan, dtype=np.float32)
    cache, rows = cache_of(device, poison, poison), np.arange(ROWS, dtype=np.int32)
    statistics = poisoned(device, (ROWS, 2, 2), FLOAT)
    rotation = Rotation(device, attention, max_context=CONTEXT, statistics=statistics)
    layer = layer_of_heads(given.bias, [given.q_norm, given.k_norm])
    rotation(given.qkv, layer, given.positions.address, device.upload(rows), cache, ROWS)
    limit = ROUNDED_ONCE[device.element]
    assert nmse(fetched(device, given.qkv)[:, :3], expected[:, :3]) < limit
    for part, head in ((cache.keys, 3), (cache.values, 4)):
        kept = fetched(device, part).reshape(-1, 64)[:ROWS]
        assert nmse(kept, expected[:, head]) < limit
