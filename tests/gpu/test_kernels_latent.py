"""Latent attention, and its rows, against float64, with poison around every context."""

import numpy as np
import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.latent import (
    as_attention,
    latent_decode,
    latent_prefill,
)
from nightmill.worker.runners.gpu.attention.prefill import PortablePrefill
from nightmill.worker.runners.gpu.attention.wide import WideDecode, WidePrefill, wide_pieces
from nightmill.worker.runners.gpu.device.device import Device
from tests.gpu.latents import (
    latent_oracle,
    make_absorbed,
    make_latents,
    run_heads,
    run_latent_decode,
    run_latent_prefill,
    run_rows,
)
from tests.gpu.oracles import ATTENTION, assert_close, nmse
from tests.support.elements import BOTH_ELEMENTS, ROUNDED_ONCE, rounded
from tests.support.operands import fetched
from tests.support.parts import latent_of

LENGTHS = [1, 2, 15, 17, 31, 32, 33, 255, 256, 257, 700, 1025]
CUTS = (1, 3, 20, 500)  # pieces at once, by which contexts are cut


@BOTH_ELEMENTS
@pytest.mark.parametrize("heads", [20, 16, 1, 40])
def test_decode_of_latents_cut_anyhow(device: Device, heads: int) -> None:
    decode_cut_anyhow(device, heads, LENGTHS, max_context=2048)


def decode_cut_anyhow(device: Device, heads: int, lengths: list[int], *, max_context: int) -> None:
    """The bits of whole contexts, and float64."""
    attention, rng = latent_of(heads), np.random.default_rng(heads)
    decode = latent_decode(device, attention, max_context=max_context)
    assert isinstance(decode, WideDecode)
    paged = make_latents(rng, device, attention, lengths, stride=-(-max_context // 16))
    queries = make_absorbed(rng, device, attention, len(lengths))
    case = attention, queries, paged, lengths
    contexts, everyone = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32)
    cuts = [
        wide_pieces(contexts, everyone, segment=decode.segment, at_once=at_once, most_cut=1000)
        for at_once in CUTS
    ]
    assert len(cuts[0]) == len(lengths) < len(cuts[-1])
    results = [run_latent_decode(device, decode, *case, pieces=pieces) for pieces in cuts]
    results.append(run_latent_decode(device, decode, *case))
    assert_close(results[0], latent_oracle(*case, [1] * len(lengths)), ATTENTION)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@BOTH_ELEMENTS
def test_decode_of_many_latents_is_that_of_few(device: Device) -> None:
    attention, rng = latent_of(20), np.random.default_rng(6)
    decode = latent_decode(device, attention, max_context=8192)
    lengths = [int(length) for length in rng.integers(1, 1500, 300)]
    lengths[7] = 6000
    paged = make_latents(rng, device, attention, lengths, stride=512)
    queries = make_absorbed(rng, device, attention, len(lengths))
    together = run_latent_decode(device, decode, attention, queries, paged, lengths)
    assert_close(together, latent_oracle(attention, queries, paged, lengths, [1] * 300), ATTENTION)
    for first in (0, 7, 150):
        part = type(paged)([], [], paged.k_cache, paged.v_cache, paged.tables[first : first + 1])
        alone = run_latent_decode(
            device, decode, attention, queries[first : first + 1], part, lengths[first : first + 1]
        )
        np.testing.assert_array_equal(alone[0], together[first])


@BOTH_ELEMENTS
@pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])
@pytest.mark.parametrize("heads", [20, 16, 128])
def test_prefill_of_latents_in_chunks_gives_the_bits_of_the_whole(
    device: Device, heads: int, portable: bool
) -> None:
    chunks, before = [330, 1, 130, 65], [0, 400, 500, 64]
    prefill_in_chunks(device, heads, chunks, before, [100, 2, 37, 191], portable=portable)


def prefill_in_chunks(
    device: Device, heads: int, chunks: list[int], before: list[int], pieces: list[int], *,
    portable: bool = False,
) -> None:  # fmt: skip
    """And float64; `pieces`: of the first prompt; portable: not by the kernel for Hopper."""
    attention, rng = latent_of(heads), np.random.default_rng(heads)
    same = as_attention(attention), attention.latent
    prefill = WidePrefill(device, *same) if portable else latent_prefill(device, attention)
    lengths = [chunk + earlier for chunk, earlier in zip(chunks, before, strict=True)]
    paged = make_latents(rng, device, attention, lengths)
    queries = make_absorbed(rng, device, attention, sum(chunks))
    whole = run_latent_prefill(device, prefill, attention, queries, paged, lengths, chunks)
    assert_close(whole, latent_oracle(attention, queries, paged, lengths, chunks), ATTENTION)
    first = 0
    for chunk in pieces:
        part = slice(first, first + chunk)
        first += chunk
        piece = run_latent_prefill(device, prefill, attention, queries[part], paged, [first], [chunk])
        np.testing.assert_array_equal(piece, whole[part])


@BOTH_ELEMENTS
@pytest.mark.parametrize(("heads", "latent", "rotated"), [(20, 512, 64), (4, 40, 8)])
def test_the_general_kernels_compute_latents(device: Device, heads: int, latent: int, rotated: int) -> None:
    """Of any sizes; fast kernels are held against them."""
    attention, rng = latent_of(heads, latent, rotated), np.random.default_rng(3)
    lengths, chunks = [17, 300, 70], [17, 20, 1]
    paged = make_latents(rng, device, attention, lengths)
    decode = GeneralDecode(device, as_attention(attention), latent)
    queries = make_absorbed(rng, device, attention, sum(chunks))
    drawn = run_latent_decode(device, decode, attention, queries[:3], paged, lengths)
    assert_close(drawn, latent_oracle(attention, queries, paged, lengths, [1] * 3), ATTENTION)
    prefill = PortablePrefill(device, as_attention(attention), latent)
    whole = run_latent_prefill(device, prefill, attention, queries, paged, lengths, chunks)
    assert_close(whole, latent_oracle(attention, queries, paged, lengths, chunks), ATTENTION)


@BOTH_ELEMENTS
@pytest.mark.parametrize("style", RopeStyle)
def test_rows_of_latents_are_normed_turned_and_kept(device: Device, style: RopeStyle) -> None:
    rows_are_kept(device, style, 100)


def rows_are_kept(device: Device, style: RopeStyle, tokens: int) -> None:
    attention = latent_of(5, style=style)
    rows = run_rows(device, attention, tokens, context=5000)
    limit = ROUNDED_ONCE[device.element]
    kept = fetched(device, rows.cache.keys).reshape(rows.kept.shape)
    np.testing.assert_array_equal(np.isnan(kept), np.isnan(rows.kept))
    assert nmse(np.nan_to_num(kept), np.nan_to_num(rows.kept)) < limit
    assert nmse(fetched(device, rows.room.down), rows.down) < limit
    absorbed = fetched(device, rows.room.absorbed).reshape(tokens, attention.heads, -1)
    assert nmse(absorbed[:, :, attention.latent :], rows.turned) < limit
    assert np.isfinite(absorbed).all()


@BOTH_ELEMENTS
@pytest.mark.parametrize(
    ("outputs", "inputs", "turned"),
    [
        *(
            (*sizes, turned)
            for sizes in [(512, 192), (256, 512), (512, 128), (40, 24)]
            for turned in (False, True)
        ),
        (20, 40, False),  # of values, which are never turned
    ],
)
def test_products_of_heads(device: Device, outputs: int, inputs: int, turned: bool) -> None:
    products_of_heads(device, outputs, inputs, turned=turned, rows=(1, 8, 9, 130, 300))


def products_of_heads(
    device: Device, outputs: int, inputs: int, *, turned: bool, rows: tuple[int, ...]
) -> None:
    """Each row with the bits that it has among many."""
    heads, rng = 3, np.random.default_rng(outputs)
    x = rounded(rng.standard_normal((max(rows), heads, inputs)), device.element)
    weights = rounded(rng.standard_normal((heads, outputs, inputs)) / np.sqrt(inputs), device.element)
    exact = np.einsum("thi,hoi->tho", x.astype(np.float64), weights.astype(np.float64))
    pitch = outputs + 12
    most = run_heads(device, x, weights, turned=turned, pitch=pitch)
    assert nmse(most[:, :, :outputs], exact) < ROUNDED_ONCE[device.element]
    assert np.isnan(most[:, :, outputs:]).all(), "wrote past a head"
    for count in rows:
        few = run_heads(device, x[-count:], weights, turned=turned, pitch=pitch)
        np.testing.assert_array_equal(few[:, :, :outputs], most[-count:, :, :outputs])
