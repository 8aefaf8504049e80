"""Decode attention against the reference in float64, with poison around every context."""

import numpy as np
import pytest

from nightmill.worker.runners.gpu.attention.choice import decode_attention
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.pieces import NO_PIECES, decode_pieces
from nightmill.worker.runners.gpu.attention.wide import WideDecode, wide_pieces
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.device.operands import ELEMENT
from tests.gpu.attending import decode_oracle, make_sinks, run_decode, run_split
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
from tests.support.elements import BOTH_ELEMENTS
from tests.support.operands import cache_of, elements, fetched, inputs_of, poisoned, shape_of

BORDERS = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 1000, 1024, 1025]


@BOTH_ELEMENTS
@pytest.mark.parametrize("shape", SHAPES + OTHER_SHAPES + SLOW_SHAPES + WIDE_SHAPES)
def test_decode_at_page_and_segment_borders(device: Device, shape: tuple[int, int, int]) -> None:
    attention = attention_of(shape)
    decode = decode_attention(device, attention, max_context=LONG)
    rng = np.random.default_rng(shape[2])
    paged = make_paged(rng, BORDERS, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, len(BORDERS), attention, device.element)
    actual = run_decode(device, decode, attention, qkv, paged, BORDERS)
    assert_close(actual, decode_oracle(attention, qkv, paged, BORDERS), ATTENTION)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "capped"])
@pytest.mark.parametrize("window", [None, 1, 16, 17, 100, 300, LONG])
@pytest.mark.parametrize("shape", SHAPES + OTHER_SHAPES + SLOW_SHAPES)
def test_decode_with_a_window_and_a_cap(
    device: Device, shape: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    """In pieces and split; what lies before the window is not read."""
    attention = attention_of(shape, window=window, softcap=softcap, scale=0.3)
    decode = decode_attention(device, attention, max_context=LONG)
    rng = np.random.default_rng(shape[0])
    lengths = [*BORDERS, 5000]
    paged = make_paged(
        rng, lengths, attention.kv_heads, attention.head_dim, stride=LONG // 16, element=device.element
    )
    for sequence, length in enumerate(lengths):
        poison_before(paged, sequence, length - (window or LONG))
    qkv = make_queries(rng, len(lengths), attention, device.element)
    contexts, everyone = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32)
    if not isinstance(decode, DecodeAttention):
        results = [run_decode(device, decode, attention, qkv, paged, lengths)]
    else:
        results = [
            run_decode(device, decode, attention, qkv, paged, lengths, pieces=pieces)
            for at_once in (1, 20)
            for pieces in [decode_pieces(contexts, everyone, segment=256, at_once=at_once, most_cut=1000)]
        ]
        if attention.head_dim <= 128:
            results.append(run_split(device, decode, attention, qkv, paged, lengths))
    assert_close(results[0], decode_oracle(attention, qkv, paged, lengths), ATTENTION)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@BOTH_ELEMENTS
@pytest.mark.parametrize("shape", [*SHAPES[:2], (4, 2, 80), (8, 4, 256), WIDE_SHAPES[0]])
def test_decode_of_long_contexts(device: Device, shape: tuple[int, int, int]) -> None:
    attention = attention_of(shape)
    decode = decode_attention(device, attention, max_context=LONG)
    rng = np.random.default_rng(5)
    for lengths in ([LONG], [LONG, 1, 31_999, 7000]):
        paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
        qkv = make_queries(rng, len(lengths), attention, device.element)
        actual = run_decode(device, decode, attention, qkv, paged, lengths)
        assert_close(actual, decode_oracle(attention, qkv, paged, lengths), ATTENTION)


@BOTH_ELEMENTS
@pytest.mark.parametrize("shape", [*SHAPES[:2], (10, 1, 96), (8, 4, 256), WIDE_SHAPES[0]])
def test_decode_alone_and_in_a_large_batch_gives_the_same_bits(
    device: Device, shape: tuple[int, int, int]
) -> None:
    attention = attention_of(shape)
    decode = decode_attention(device, attention, max_context=LONG)
    rng = np.random.default_rng(6)
    lengths = [int(length) for length in rng.integers(1, 1500, 300)]
    lengths[7] = 3000
    paged = make_paged(
        rng, lengths, attention.kv_heads, attention.head_dim, stride=LONG // 16, element=device.element
    )
    qkv = make_queries(rng, len(lengths), attention, device.element)
    together = run_decode(device, decode, attention, qkv, paged, lengths)
    assert_close(together, decode_oracle(attention, qkv, paged, lengths), ATTENTION)
    for count in (1, 3, 40):
        part = Paged(
            paged.keys[7 : 7 + count], paged.values[7 : 7 + count], paged.k_cache, paged.v_cache,
            paged.tables[7 : 7 + count],
        )  # fmt: skip
        alone = run_decode(device, decode, attention, qkv[7 : 7 + count], part, lengths[7 : 7 + count])
        np.testing.assert_array_equal(alone, together[7 : 7 + count])


@BOTH_ELEMENTS
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("context", [500, 1000, 2048, LONG])  # clusters of 2, 4, 8, and of 8 in a longer grid
@pytest.mark.parametrize(
    "shape", [(14, 2, 64), (16, 2, 128), (32, 2, 64), (32, 2, 128), (20, 1, 64), (4, 2, 80)]
)
def test_decode_in_clusters_gives_the_bits_of_other_launches(
    device: Device, shape: tuple[int, int, int], context: int, window: int | None
) -> None:
    attention = attention_of(shape, window=window)
    best, portable = (
        DecodeAttention(device, attention, max_context=context, clusters=device.hopper and clusters)
        for clusters in (True, False)
    )
    rng = np.random.default_rng(context)
    candidates = [1, 256, 0, 257, 16, 500, 255, 513, 1000, 1025, 2047, 2048, 1793, 2049, 300, 7000]
    lengths = [length for length in candidates if length <= context]
    paged = make_paged(
        rng, lengths, attention.kv_heads, attention.head_dim, stride=-(-context // 16), element=device.element
    )
    qkv = make_queries(rng, len(lengths), attention, device.element)
    # In one piece: so many sequences that none is split.
    many = np.resize(np.arange(len(lengths)), 3 * device.multiprocessors)
    repeated = Paged([], [], paged.k_cache, paged.v_cache, paged.tables[many])
    together = run_decode(device, best, attention, qkv[many], repeated, [lengths[s] for s in many])
    together = together[: len(lengths)]
    held = np.flatnonzero(lengths)
    visible = Paged([paged.keys[s] for s in held], [paged.values[s] for s in held], *[np.empty(0)] * 3)
    expected = decode_oracle(attention, qkv[held], visible, [lengths[s] for s in held])
    assert_close(together[held], expected, ATTENTION)
    for first in range(len(lengths)):
        for some in ([first], [first, lengths.index(0), (first + 3) % len(lengths)]):
            part = Paged([], [], paged.k_cache, paged.v_cache, paged.tables[some])
            for decode in (best, portable):
                few = [lengths[s] for s in some]
                actual = run_decode(device, decode, attention, qkv[some], part, few, pieces=NO_PIECES)
                np.testing.assert_array_equal(actual, together[some])


@BOTH_ELEMENTS
@pytest.mark.parametrize("window", [None, 16, 1500])
@pytest.mark.parametrize("shape", [(14, 2, 64), (16, 2, 128), (32, 2, 64), (20, 1, 64)])
def test_contexts_cut_anyhow_give_the_bits_of_whole_ones(
    device: Device, shape: tuple[int, int, int], window: int | None
) -> None:
    attention = attention_of(shape, window=window)
    decode = decode_attention(device, attention, max_context=LONG)
    rng = np.random.default_rng(13)
    lengths = [9000, 1, 300, 5000, 255, 256, 257, LONG, 0, 4097, 2000, 16]
    paged = make_paged(
        rng, lengths, attention.kv_heads, attention.head_dim, stride=LONG // 16, element=device.element
    )
    qkv = make_queries(rng, len(lengths), attention, device.element)
    held = np.flatnonzero(lengths)
    contexts, everyone = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32)
    cuts = [
        (1, 0),
        (1, 1000),
        (3, 1000),
        (20, 1000),
        (20, 40),
        (500, 1000),
    ]  # at once, most that is cut
    whole, *cut = (
        decode_pieces(contexts, everyone, segment=256, at_once=at_once, most_cut=most)
        for at_once, most in cuts
    )
    assert len(whole) == len(lengths)
    assert len({len(pieces) for pieces in cut}) > 3
    expected = run_decode(device, decode, attention, qkv, paged, lengths, pieces=whole)
    visible = Paged([paged.keys[s] for s in held], [paged.values[s] for s in held], *[np.empty(0)] * 3)
    oracle = decode_oracle(attention, qkv[held], visible, [lengths[s] for s in held])
    assert_close(expected[held], oracle, ATTENTION)
    assert np.isnan(expected[8]).all()
    for pieces in cut:
        actual = run_decode(device, decode, attention, qkv, paged, lengths, pieces=pieces)
        np.testing.assert_array_equal(actual, expected)
    split = run_decode(device, decode, attention, qkv, paged, lengths, pieces=whole[:0])
    np.testing.assert_array_equal(split, expected)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SLOW_SHAPES[0]])
def test_decode_leaves_empty_sequences_and_prompts_alone(device: Device, shape: tuple[int, ...]) -> None:
    attention = attention_of(shape)
    decode = decode_attention(device, attention, max_context=4096)
    rng = np.random.default_rng(8)
    lengths = [100, 0, 700, 0, 20]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, 9, attention, device.element)  # 4 rows of prompts
    out = poisoned(device, (9, attention.heads, attention.head_dim), ELEMENT)
    contexts = np.array(lengths, dtype=np.int32)
    inputs = inputs_of(
        device, table_width=paged.tables.shape[1], page_tables=paged.tables, context_lengths=contexts
    )
    cache = cache_of(device, paged.k_cache, paged.v_cache)
    decode(elements(device, qkv), cache, inputs, shape_of(tokens=9, drawn=5), out)
    actual = fetched(device, out)
    for sequence in (0, 2, 4):
        expected = attention_oracle(
            attention, qkv[sequence : sequence + 1], paged.keys[sequence], paged.values[sequence],
            np.array([lengths[sequence]]),
        )  # fmt: skip
        assert_close(actual[sequence : sequence + 1], expected, ATTENTION)
    assert np.isnan(np.delete(actual, [0, 2, 4], axis=0)).all()


@BOTH_ELEMENTS
def test_scores_far_beyond_half_precision_are_fine(device: Device) -> None:
    attention = attention_of(SHAPES[0])
    decode = decode_attention(device, attention, max_context=4096)
    rng = np.random.default_rng(11)
    lengths = [300, 40]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    for keys, table in zip(paged.keys, paged.tables, strict=True):
        keys[..., 0] = 600.0  # as Qwen2's key bias: scores of several 100,000
        places = np.arange(len(keys))
        paged.k_cache[table[places // 16], :, places % 16] = keys
    qkv = make_queries(rng, 2, attention, device.element)
    qkv[:, : attention.heads, 0] = 400.0
    actual = run_decode(device, decode, attention, qkv, paged, lengths)
    assert_close(actual, decode_oracle(attention, qkv, paged, lengths), ATTENTION)


@pytest.mark.parametrize("count", [3, 300])  # split and in one piece
def test_a_captured_launch_serves_other_contexts(device: Device, count: int) -> None:
    attention = attention_of(SHAPES[0])
    decode = decode_attention(device, attention, max_context=8192)
    rng = np.random.default_rng(12)
    lengths = [int(length) for length in rng.integers(1, 900, count)]
    lengths[0], lengths[1] = 5000, 0  # the second is padding
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, count, attention, device.element)
    now = np.array(lengths, dtype=np.int32)
    pieces = decode.pieces(now, np.arange(count, dtype=np.int32))
    assert (len(pieces) > 0) == (count > 3)
    inputs = inputs_of(
        device, table_width=paged.tables.shape[1], page_tables=np.zeros_like(paged.tables),
        context_lengths=np.ones(count, dtype=np.int32),
        pieces=np.full((max(len(pieces), 1), 4), -1, dtype=np.int32),
    )  # fmt: skip
    queries, cache = elements(device, qkv), cache_of(device, paged.k_cache, paged.v_cache)
    out = poisoned(device, (count, attention.heads, attention.head_dim), ELEMENT)
    step = shape_of(tokens=count, drawn=count, pieces=len(pieces))
    graph = Graph(device, lambda: decode(queries, cache, inputs, step, out))
    device.copy_in(inputs.page_tables, paged.tables)
    device.copy_in(inputs.context_lengths, now)
    if len(pieces):
        device.copy_in(inputs.pieces, pieces)
    device.synchronize()
    graph.launch()
    actual = fetched(device, out)
    graph.close()
    assert np.isnan(actual[1]).all()
    for sequence in (0, 2):
        expected = attention_oracle(
            attention, qkv[sequence : sequence + 1], paged.keys[sequence], paged.values[sequence],
            np.array([lengths[sequence]]),
        )  # fmt: skip
        assert_close(actual[sequence : sequence + 1], expected, ATTENTION)


@BOTH_ELEMENTS
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("shape", [(64, 8, 64), (16, 2, 128), (8, 4, 256), (20, 1, 64), SLOW_SHAPES[0]])
def test_sinks_join_a_softmax_after_all_parts_of_a_context(
    device: Device, shape: tuple[int, int, int], window: int | None
) -> None:
    """As gpt-oss has them. Cut anyhow, in clusters and whole, with the same bits."""
    attention = attention_of(shape, window=window, sinks=True)
    decode = decode_attention(device, attention, max_context=LONG)
    rng = np.random.default_rng(17)
    lengths = [*BORDERS, 5000]
    paged = make_paged(
        rng, lengths, attention.kv_heads, attention.head_dim, stride=LONG // 16, element=device.element
    )
    paged.sinks = make_sinks(rng, attention)
    for sequence, length in enumerate(lengths):
        poison_before(paged, sequence, length - (window or LONG))
    qkv = make_queries(rng, len(lengths), attention, device.element)
    case = attention, qkv, paged, lengths
    results = [run_decode(device, decode, *case)]
    if isinstance(decode, DecodeAttention):
        contexts, everyone = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32)
        for at_once in (1, 20):
            pieces = decode_pieces(contexts, everyone, segment=256, at_once=at_once, most_cut=1000)
            results.append(run_decode(device, decode, *case, pieces=pieces))
        if attention.head_dim <= 128:
            results.append(run_split(device, decode, *case))
    assert_close(results[0], decode_oracle(*case), ATTENTION)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@BOTH_ELEMENTS
@pytest.mark.parametrize("shape", WIDE_SHAPES)
def test_contexts_of_wide_heads_cut_anyhow_give_the_bits_of_whole_ones(
    device: Device, shape: tuple[int, int, int]
) -> None:
    wide_contexts_cut_anyhow(device, shape, [9000, 1, 300, 255, 256, 257, 4097, 16], LONG)


def wide_contexts_cut_anyhow(
    device: Device, shape: tuple[int, int, int], lengths: list[int], max_context: int
) -> None:
    """And float64."""
    attention, rng = attention_of(shape), np.random.default_rng(19)
    decode = WideDecode(device, attention, max_context=max_context)
    paged = make_paged(
        rng, lengths, attention.kv_heads, attention.head_dim, stride=-(-max_context // 16),
        element=device.element,
    )  # fmt: skip
    qkv = make_queries(rng, len(lengths), attention, device.element)
    contexts, everyone = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32)
    whole, *cuts = (
        wide_pieces(contexts, everyone, segment=decode.segment, at_once=at_once, most_cut=1000)
        for at_once in (1, 5, 100)
    )
    assert len(whole) == len(lengths) < len(cuts[-1])
    expected = run_decode(device, decode, attention, qkv, paged, lengths, pieces=whole)
    assert_close(expected, decode_oracle(attention, qkv, paged, lengths), ATTENTION)
    for pieces in cuts:
        actual = run_decode(device, decode, attention, qkv, paged, lengths, pieces=pieces)
        np.testing.assert_array_equal(actual, expected)
