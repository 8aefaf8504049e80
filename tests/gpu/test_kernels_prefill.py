"""Prefill attention against the reference in float64, with poison around every context."""

import numpy as np
import pytest

from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.attention.choice import prefill_attention
from nightmill.worker.runners.gpu.attention.hopper_wide import HopperWide
from nightmill.worker.runners.gpu.attention.plans import Prefill
from nightmill.worker.runners.gpu.attention.prefill import PortablePrefill
from nightmill.worker.runners.gpu.attention.wide import WidePrefill
from nightmill.worker.runners.gpu.device.device import Device
from tests.gpu.attending import make_sinks, prefill_oracle, run_prefill
from tests.gpu.oracles import (  # fmt: skip
    ATTENTION,
    LONG,
    OTHER_SHAPES,
    SHAPES,
    SLOW_SHAPES,
    WIDE_SHAPES,
    Paged,
    assert_close,
    attention_of,
    attention_oracle,
    make_paged,
    make_queries,
    poison_before,
)
from tests.support.elements import BOTH_ELEMENTS, rounded

TILE = 64  # keys, whose tiles count from a sequence's first


def make_prefill(device: Device, attention: Attention, *, portable: bool = False) -> Prefill:
    """The best launcher for the device, or the best for all."""
    return PortablePrefill(device, attention) if portable else prefill_attention(device, attention)


@BOTH_ELEMENTS
@pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])
@pytest.mark.parametrize("shape", SHAPES + OTHER_SHAPES + SLOW_SHAPES + WIDE_SHAPES)
def test_prefill_of_ragged_chunks(device: Device, shape: tuple[int, int, int], portable: bool) -> None:
    attention = attention_of(shape)
    prefill = make_prefill(device, attention, portable=portable)
    rng = np.random.default_rng(shape[0])
    # First a token that was drawn; whole prompts, then chunks in the middle of a context, at page borders.
    chunks = [1, 7, 63, 64, 65, 130, 1, 2, 16, 17, 15, 100, 33, 1]
    before = [40, 0, 0, 0, 0, 0, 0, 1, 15, 16, 17, 128, 999, 64]
    lengths = [chunk + earlier for chunk, earlier in zip(chunks, before, strict=True)]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, sum(chunks), attention, device.element)
    actual = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks, drawn=1)
    assert np.isnan(actual[0]).all()  # not ours
    row = 1
    for sequence, chunk in enumerate(chunks[1:], start=1):
        part = slice(row, row + chunk)
        row += chunk
        visible = lengths[sequence] - chunk + np.arange(chunk) + 1
        expected = attention_oracle(
            attention, qkv[part], paged.keys[sequence], paged.values[sequence], visible
        )
        assert_close(actual[part], expected, ATTENTION)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "capped"])
@pytest.mark.parametrize("window", [None, 1, 16, 17, 100, 300, LONG])
@pytest.mark.parametrize("shape", SHAPES + OTHER_SHAPES + SLOW_SHAPES)
def test_prefill_with_a_window_and_a_cap(
    device: Device, shape: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    """Tiles of keys before the window of a chunk's first token are not read; chunks have the whole's bits."""
    attention = attention_of(shape, window=window, softcap=softcap, scale=0.3)
    rng = np.random.default_rng(shape[0])
    chunks, before = [330, 1, 130, 65, 20], [0, 400, 500, 64, 63]
    lengths = [chunk + earlier for chunk, earlier in zip(chunks, before, strict=True)]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    for sequence, earlier in enumerate(before):
        poison_before(paged, sequence, (earlier + 1 - (window or LONG)) // TILE * TILE)
    qkv = make_queries(rng, sum(chunks), attention, device.element)
    expected = prefill_oracle(attention, qkv, paged, lengths, chunks)
    for portable in (False, True):
        prefill = make_prefill(device, attention, portable=portable)
        whole = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks)
        assert_close(whole, expected, ATTENTION)
        first = 0
        for chunk in (100, 2, 37, 191):
            part = slice(first, first + chunk)
            first += chunk
            piece = run_prefill(device, prefill, attention, qkv[part], paged, [first], [chunk])
            np.testing.assert_array_equal(piece, whole[part])


@BOTH_ELEMENTS
@pytest.mark.parametrize("shape", WIDE_SHAPES)
def test_prompts_of_wide_heads_in_chunks_give_the_bits_of_the_whole(
    device: Device, shape: tuple[int, int, int]
) -> None:
    wide_prompts_in_chunks(device, shape, [330, 1, 130], [330, 401, 630])


def wide_prompts_in_chunks(
    device: Device, shape: tuple[int, int, int], chunks: list[int], lengths: list[int]
) -> None:
    """And float64."""
    attention, rng = attention_of(shape), np.random.default_rng(2)
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, sum(chunks), attention, device.element)
    prefill = make_prefill(device, attention)
    assert isinstance(prefill, WidePrefill | HopperWide)
    whole = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks)
    assert_close(whole, prefill_oracle(attention, qkv, paged, lengths, chunks), ATTENTION)
    cut = chunks[0] * 3 // 4
    for part in (slice(0, cut), slice(cut, chunks[0])):
        length = part.stop - part.start
        piece = run_prefill(device, prefill, attention, qkv[part], paged, [part.stop], [length])
        np.testing.assert_array_equal(piece, whole[part])


@BOTH_ELEMENTS
@pytest.mark.parametrize("shape", [*SHAPES[:2], (4, 2, 80), (8, 4, 256), WIDE_SHAPES[0]])
def test_prefill_deep_in_a_long_context(device: Device, shape: tuple[int, int, int]) -> None:
    attention = attention_of(shape)
    prefill = make_prefill(device, attention)
    rng = np.random.default_rng(9)
    chunks, lengths = [129, 1000], [LONG, 1000]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, sum(chunks), attention, device.element)
    actual = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks)
    for sequence, part in enumerate((slice(0, 129), slice(129, 1129))):
        chunk = part.stop - part.start
        visible = lengths[sequence] - chunk + np.arange(chunk) + 1
        expected = attention_oracle(
            attention, qkv[part], paged.keys[sequence], paged.values[sequence], visible
        )
        assert_close(actual[part], expected, ATTENTION)


@BOTH_ELEMENTS
@pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])
@pytest.mark.parametrize("shape", [*SHAPES[:2], WIDE_SHAPES[0]])
def test_prefill_in_chunks_gives_the_bits_of_prefill_in_one_piece(
    device: Device, shape: tuple[int, int, int], portable: bool
) -> None:
    attention = attention_of(shape)
    prefill = make_prefill(device, attention, portable=portable)
    rng = np.random.default_rng(10)
    paged = make_paged(rng, [600], attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, 600, attention, device.element)
    whole = run_prefill(device, prefill, attention, qkv, paged, [600], [600])
    first = 0
    for chunk in (100, 2, 37, 461):
        part = slice(first, first + chunk)
        first += chunk
        piece = run_prefill(device, prefill, attention, qkv[part], paged, [first], [chunk])
        np.testing.assert_array_equal(piece, whole[part])


@pytest.mark.parametrize("shape", [(14, 2, 64), (16, 8, 128), (4, 4, 64), (32, 1, 128), (4, 2, 96)])
def test_prefill_of_more_tiles_than_blocks(device: Device, shape: tuple[int, int, int]) -> None:
    attention = attention_of(shape)
    prefill = make_prefill(device, attention)
    rng = np.random.default_rng(13)
    chunks = [int(chunk) for chunk in rng.integers(2, 200, 150)]
    lengths = [chunk + int(earlier) for chunk, earlier in zip(chunks, rng.integers(0, 150, 150), strict=True)]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, sum(chunks), attention, device.element)
    actual = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks)
    assert_close(actual, prefill_oracle(attention, qkv, paged, lengths, chunks), ATTENTION)
    again = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks)
    np.testing.assert_array_equal(again, actual)


RISING = 600  # tokens


@pytest.fixture(params=[False, True], ids=["best", "portable"])
def rising(
    device: Device, request: pytest.FixtureRequest, shape: tuple[int, int, int]
) -> tuple[Attention, Prefill, np.ndarray, Paged]:
    """Queries, and keys whose first element grows with their position, by leaps after 300 and 400.

    Heads take it with factors 0, 4, -4 and 1: maxima that stay, that rise in every tile, that are the first.
    """
    attention = attention_of(shape)
    prefill = make_prefill(device, attention, portable=request.param)
    rng = np.random.default_rng(14)
    paged = make_paged(rng, [RISING], attention.kv_heads, attention.head_dim, element=device.element)
    places = np.arange(RISING)
    growing = places * 0.5 + 1000.0 * (places > 300) + 29_000.0 * (places > 400)
    paged.keys[0][..., 0] = rounded(growing, device.element)[:, None]
    paged.k_cache[paged.tables[0][places // 16], :, places % 16] = paged.keys[0]
    qkv = make_queries(rng, RISING, attention, device.element)
    qkv[:, : attention.heads, 0] = np.resize([0.0, 4.0, -4.0, 1.0], attention.heads)
    return attention, prefill, qkv, paged


@BOTH_ELEMENTS
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_prefill_where_later_scores_are_much_larger(
    device: Device, rising: tuple[Attention, Prefill, np.ndarray, Paged]
) -> None:
    attention, prefill, qkv, paged = rising
    whole = run_prefill(device, prefill, attention, qkv, paged, [RISING], [RISING])
    expected = prefill_oracle(attention, qkv, paged, [RISING], [RISING])
    for head in range(attention.heads):
        assert_close(whole[:, head], expected[:, head], ATTENTION)
    first = 0
    for chunk in (100, 2, 37, 461):
        part = slice(first, first + chunk)
        first += chunk
        piece = run_prefill(device, prefill, attention, qkv[part], paged, [first], [chunk])
        np.testing.assert_array_equal(piece, whole[part])


@BOTH_ELEMENTS
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_rising_scores_of_some_rows_leave_the_bits_of_others(
    device: Device, rising: tuple[Attention, Prefill, np.ndarray, Paged]
) -> None:
    attention, prefill, qkv, paged = rising
    mixed = run_prefill(device, prefill, attention, qkv, paged, [RISING], [RISING])
    qkv[:, 1 : attention.heads : 4, 0] = 0.0
    plain = run_prefill(device, prefill, attention, qkv, paged, [RISING], [RISING])
    others = np.delete(np.arange(attention.heads), np.arange(1, attention.heads, 4))
    np.testing.assert_array_equal(mixed[:, others], plain[:, others])


@BOTH_ELEMENTS
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("portable", [False, True], ids=["best", "portable"])
@pytest.mark.parametrize("shape", [(64, 8, 64), (16, 2, 128), (8, 4, 256), SLOW_SHAPES[0]])
def test_sinks_join_a_softmax_at_its_end(
    device: Device, shape: tuple[int, int, int], portable: bool, window: int | None
) -> None:
    attention = attention_of(shape, window=window, sinks=True)
    prefill = make_prefill(device, attention, portable=portable)
    rng = np.random.default_rng(18)
    chunks, before = [330, 1, 130], [0, 400, 500]
    lengths = [chunk + earlier for chunk, earlier in zip(chunks, before, strict=True)]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    paged.sinks = make_sinks(rng, attention)
    for sequence, earlier in enumerate(before):
        poison_before(paged, sequence, (earlier + 1 - (window or LONG)) // TILE * TILE)
    qkv = make_queries(rng, sum(chunks), attention, device.element)
    whole = run_prefill(device, prefill, attention, qkv, paged, lengths, chunks)
    assert_close(whole, prefill_oracle(attention, qkv, paged, lengths, chunks), ATTENTION)
    first = 0
    for chunk in (100, 2, 37, 191):
        part = slice(first, first + chunk)
        first += chunk
        piece = run_prefill(device, prefill, attention, qkv[part], paged, [first], [chunk])
        np.testing.assert_array_equal(piece, whole[part])
