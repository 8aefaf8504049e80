"""Job ids: their order is the order of enqueueing, in one process and any number of threads."""

import itertools
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.ids import IdSource, JobIds

hex_ids = st.binary(min_size=16, max_size=16).map(bytes.hex)


def test_ids_are_uuid7_of_the_present_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightmill.jobs.base.ids.time.time_ns", lambda: 1_700_000_000_123_456_789)
    drawn = uuid.UUID(IdSource().draw())
    assert drawn.version == 7
    assert drawn.variant == uuid.RFC_4122
    assert drawn.int >> 80 == 1_700_000_000_123


def test_ids_increase_within_a_millisecond_and_when_the_clock_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = itertools.chain([5_000_000] * 500, [3_000_000] * 500, itertools.repeat(9_000_000))
    monkeypatch.setattr("nightmill.jobs.base.ids.time.time_ns", lambda: next(moments))
    source = IdSource()
    drawn = [source.draw() for _ in range(1500)]
    assert drawn == sorted(set(drawn))


def test_counting_over_the_end_of_the_random_bits_leaves_version_and_variant_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nightmill.jobs.base.ids.os.urandom", lambda count: b"\xff" * count)
    monkeypatch.setattr("nightmill.jobs.base.ids.time.time_ns", lambda: 5_000_000)
    source = IdSource()
    first, second = source.draw(), source.draw()
    assert first < second
    for drawn in (first, second):
        assert (uuid.UUID(drawn).version, uuid.UUID(drawn).variant) == (7, uuid.RFC_4122)
    assert int(second, 16) >> 80 == 6  # the next millisecond, since this one is used up


def test_counting_carries_from_the_low_random_bits_into_the_high_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "nightmill.jobs.base.ids.os.urandom", lambda count: b"\x00\x01" + b"\xff" * (count - 2)
    )
    monkeypatch.setattr("nightmill.jobs.base.ids.time.time_ns", lambda: 5_000_000)
    source = IdSource()
    first, second = int(source.draw(), 16), int(source.draw(), 16)
    assert (second >> 64) & 0xFFF == ((first >> 64) & 0xFFF) + 1
    assert second & ((1 << 62) - 1) == 0
    assert second >> 80 == first >> 80


def test_threads_never_draw_the_same_id_and_each_sees_its_own_increase() -> None:
    source, barrier = IdSource(), threading.Barrier(8)

    def draw(_: int) -> list[str]:
        barrier.wait(120)
        return [source.draw() for _ in range(500)]

    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(draw, range(8)))
    assert all(one == sorted(one) for one in drawn)
    assert len({job_id for one in drawn for job_id in one}) == 8 * 500


@given(st.lists(hex_ids, max_size=20), st.slices(20))
def test_job_ids_behave_as_the_list_of_their_texts(texts: list[str], part: slice) -> None:
    ids = JobIds(texts)
    assert len(ids) == len(texts)
    assert list(ids) == texts
    assert ids == texts
    assert ids[part] == texts[part]
    assert isinstance(ids[part], JobIds)
    assert list(reversed(ids)) == texts[::-1]
    for index in range(-len(texts), len(texts)):
        assert ids[index] == texts[index]
    assert all(text in ids for text in texts)


def test_job_ids_grow_take_16_bytes_each_and_know_their_bounds() -> None:
    ids = JobIds(["0" * 32])
    ids.extend(["1" * 32, "2" * 32])
    assert list(ids) == ["0" * 32, "1" * 32, "2" * 32]
    assert len(ids._bytes) == 3 * 16
    assert repr(ids) == "<3 job ids>"
    for index in (3, -4):
        with pytest.raises(IndexError, match="job id index out of range"):
            ids[index]
    with pytest.raises(TypeError, match="unhashable"):
        hash(ids)
