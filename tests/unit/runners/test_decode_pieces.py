"""How contexts are shared out among blocks of decode attention: each token once, none waits for one block."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nightmill.worker.runners.gpu.attention import decode
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.pieces import SECTION, WAVES, Planner, decode_pieces
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.specs import dense_spec

SEGMENT = 256
LENGTHS = st.lists(st.integers(0, 40_000), min_size=1, max_size=80)


def cut(lengths: list[int], at_once: int, most_cut: int = 10_000) -> np.ndarray:
    contexts, sequences = np.array(lengths, dtype=np.int32), np.arange(len(lengths), dtype=np.int32) + 1000
    return decode_pieces(contexts, sequences, segment=SEGMENT, at_once=at_once, most_cut=most_cut)


@given(LENGTHS, st.integers(1, 300), st.integers(0, 500))
def test_every_segment_is_computed_once_and_meets_the_others_of_its_context(
    lengths: list[int], at_once: int, most_cut: int
) -> None:
    pieces = cut(lengths, at_once, most_cut)
    assert len(pieces) <= len(lengths) + WAVES * at_once
    taken: set[int] = set()
    for place, length in enumerate(lengths):
        mine = pieces[pieces[:, 0] == 1000 + place]
        segments = -(-length // SEGMENT)
        spans = sorted((word & 0xFFFF, word >> 16) for word in mine[:, 1].tolist())
        assert [index for first, end in spans for index in range(first, end)] == list(range(segments))
        assert set(mine[:, 3].tolist()) <= {length}
        if len(mine) < 2:
            assert mine[:, 2].tolist() == [-1] * len(mine)
            continue
        (word,) = set(mine[:, 2].tolist())
        base, unit = word // 2, SECTION if word % 2 else 1
        assert all(first % unit == 0 for first, _ in spans)
        room = set(range(base, base + -(-segments // unit)))
        assert not room & taken
        assert max(room) < most_cut
        taken |= room


@given(LENGTHS, st.integers(1, 300))
def test_the_longest_pieces_come_first_and_none_is_what_all_wait_for(
    lengths: list[int], at_once: int
) -> None:
    pieces = cut(lengths, at_once)
    sizes = (pieces[:, 1] >> 16) - (pieces[:, 1] & 0xFFFF)
    assert (np.diff(sizes) <= 0).all()
    segments = [-(-length // SEGMENT) for length in lengths]
    load = sum(-(-count // SECTION) * SECTION for count in segments) / at_once
    of_one_length = max(segments) * len(segments) < 1.5 * sum(segments) and len(segments) >= 0.4 * at_once
    assert of_one_length or sizes[0] <= max(2 * SECTION, 2 * load)


def test_one_long_context_among_short_ones_is_cut_and_they_are_not() -> None:
    pieces = cut([500] * 63 + [30_000], 264)
    assert len(pieces) == 63 + 30  # of a section
    assert set(pieces[:, 2].tolist()) == {-1, 1}
    assert len(cut([500] * 30 + [10_000], 264)) == 30 * 2 + 40  # few: each segment is a piece


def test_contexts_of_one_length_stay_whole_where_they_fill_the_gpu() -> None:
    for length, whole in ((640, 1024), (2048, 256), (1024, 120)):
        assert len(cut([length] * whole, 264)) == whole
    assert len(cut([4096] * 128, 264)) == 128 * 4
    assert len(cut([32_000] * 32, 264)) == 32 * 16  # of two sections: there is much to compute


def test_contexts_of_many_lengths_stay_whole_where_others_make_up_for_them() -> None:
    lengths = np.random.default_rng(1).integers(100, 2000, 1024).tolist()
    assert len(cut(lengths, 264)) == 1024
    assert len(cut([*lengths, 30_000], 264)) == 1024 + 15
    assert len(cut(lengths[:256], 264)) > 256


def test_whole_contexts_stand_in_order_of_their_tokens() -> None:
    pieces = cut([300, 500, 0, 400], 6)
    assert pieces.tolist() == [
        [1001, 2 << 16, -1, 500],
        [1003, 2 << 16, -1, 400],
        [1000, 2 << 16, -1, 300],
        [-1, 0, -1, 0],
    ]


def test_a_plan_that_is_kept_while_contexts_grow_is_the_one_that_would_be_made() -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 2000, 70).astype(np.int32)
    sequences = rng.permutation(100)[:70].astype(np.int32)
    planner = Planner(segment=SEGMENT, at_once=264, most_cut=10_000)
    kept = 0
    for step in range(600):
        before = planner._pieces
        pieces = planner.pieces(lengths, sequences)
        kept += pieces is before
        made = decode_pieces(lengths, sequences, segment=SEGMENT, at_once=264, most_cut=10_000)
        without_base = [sorted(map(tuple, rows[:, [0, 1, 3]].tolist())) for rows in (pieces, made)]
        assert without_base[0] == without_base[1], step
        lengths[lengths > 0] += 1
        if step % 100 == 50:  # another batch
            lengths, sequences = lengths[1:].copy(), sequences[1:].copy()
    assert kept > 300


def test_the_same_contexts_of_other_sequences_are_another_plan() -> None:
    planner = Planner(segment=SEGMENT, at_once=6, most_cut=0)
    lengths = np.array([300, 500], dtype=np.int32)
    for sequences in ([4, 9], [9, 4], [4, 9]):
        pieces = planner.pieces(lengths, np.array(sequences, dtype=np.int32))
        assert pieces[:, [0, 3]].tolist() == [[sequences[1], 500], [sequences[0], 300]]


class OneOf:
    """Stands for a GPU and its kernels: so many multiprocessors, each of which holds so many blocks."""

    hopper = True

    def __init__(self, multiprocessors: int, held: int, kv: KvFormat) -> None:
        self.kv = kv
        self.multiprocessors = multiprocessors
        self.many = SimpleNamespace(blocks_at_once=lambda threads, shared: held)

    def function(self, name: str, arguments: str, **options: int) -> "OneOf":
        return self

    def allocate(self, size: int, purpose: str) -> int:
        return 0

    def fill(self, address: int, value: int, size: int) -> None:
        pass


@given(
    st.sampled_from([(14, 2, 64), (28, 4, 128), (32, 32, 128), (2, 1, 64), (4, 2, 80), (16, 1, 256)]),
    st.sampled_from(KvFormat),
    st.sampled_from([40, 132]),
    st.integers(1, 7),
    st.sampled_from([300, 1025, 32_768]),
    st.lists(st.integers(1, 32_768), min_size=1, max_size=40),
    st.integers(1, 20),
)
def test_whatever_contexts_a_step_has_it_is_padded_to_a_size_that_is_known_at_the_start(
    heads: tuple[int, int, int], kv: KvFormat, multiprocessors: int, held: int, most: int, lengths: list[int],
    times: int,
) -> None:  # fmt: skip
    """One that is not would have no graph."""
    gpu: Any = OneOf(multiprocessors, held, kv)
    layer = dense_spec(heads=heads[0], kv_heads=heads[1], head_dim=heads[2]).layers[0]
    with patch.object(decode, "KernelPairs", lambda device, source: gpu):
        attention = DecodeAttention(gpu, layer.attention, max_context=most)
    contexts = np.minimum(np.array(lengths * times, dtype=np.int32), most)
    count = len(contexts)
    pieces = len(attention.pieces(contexts, np.arange(count, dtype=np.int32)))
    room = attention.room(count, pieces)
    assert pieces <= room <= attention.most_pieces(count)
    assert room in attention.rooms(count)
    assert len(attention.rooms(count)) <= 5
