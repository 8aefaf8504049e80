"""The page pool: counting, and an audit that notices every kind of fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool


def test_pages_are_taken_and_given_back() -> None:
    pool = PagePool(4, 16)
    table = pool.allocate(3)
    assert (pool.free, pool.used, len(set(table))) == (1, 3, 3)
    pool.check_integrity([table])
    pool.release(table)
    assert pool.free == 4
    pool.check_integrity([])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert PagePool(4, 16).pages_for(tokens) == pages


def test_more_pages_than_free_are_refused_and_none_is_taken() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(ValueError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    assert pool.free == 2


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = PagePool(2, 16)
    table = pool.allocate(1)
    pool.share(table)
    pool.check_integrity([table, table])
    pool.release(table)
    assert pool.free == 1
    pool.release(table)
    assert pool.free == 2


def test_a_page_cannot_be_released_twice_or_shared_when_free() -> None:
    pool = PagePool(2, 16)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(table)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(table)


def test_audit_notices_faults() -> None:
    pool = PagePool(3, 16)
    table = pool.allocate(2)
    for tables in ([], [table, table], [table[:1]], [[*table, 2]], [[*table, 99]]):
        with pytest.raises(CacheIntegrityError):
            pool.check_integrity(tables)
    pool._empty.append(pool._empty[0])
    with pytest.raises(CacheIntegrityError, match="times in the free list"):
        pool.check_integrity([table])


def test_a_kept_page_stays_shareable_without_an_owner_and_counts_as_free() -> None:
    pool = PagePool(2, 16)
    (page,) = pool.allocate(1)
    pool.keep(page)
    pool.release([page])
    assert (pool.free, pool.idle()) == (2, [page])
    pool.share([page])
    assert (pool.free, pool.owners(page), pool.idle()) == (1, 1, [])
    pool.check_integrity([[page]])


def test_idle_pages_are_given_away_last_and_the_least_recently_owned_first() -> None:
    pool = PagePool(5, 16)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    first, second = pool.allocate(2), pool.allocate(2)
    for page in first + second:
        pool.keep(page)
    pool.release(second)
    pool.release(first)
    pool.share(second)  # used again: now `first` is the oldest
    pool.release(second)
    pool.allocate(1)
    assert evicted == []
    taken = pool.allocate(3)
    assert evicted == [first[1], first[0], second[1]]  # the end of a sequence goes before its beginning
    pool.release(taken)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([first[0]])


def test_a_free_page_holds_nothing_to_keep() -> None:
    with pytest.raises(ValueError, match="nothing in it to keep"):
        PagePool(1, 16).keep(0)


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (1, 0), (-1, 16)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs pages"):
        PagePool(blocks, size)


@given(
    st.lists(st.tuples(st.sampled_from(["take", "keep", "share", "drop"]), st.integers(0, 5)), max_size=60)
)
def test_any_sequence_of_operations_keeps_the_books(operations: list[tuple[str, int]]) -> None:
    pool = PagePool(7, 4)
    tables: list[list[int]] = []
    for operation, number in operations:
        if operation == "take" and number <= pool.free:
            tables.append(pool.allocate(number))
        elif tables and operation == "keep":
            for page in tables[number % len(tables)]:
                pool.keep(page)
        elif tables and operation == "share":
            shared = tables[number % len(tables)]
            pool.share(shared)
            tables.append(list(shared))
        elif tables and operation == "drop":
            pool.release(tables.pop(number % len(tables)))
        pool.check_integrity(tables)
        assert pool.used == len({page for table in tables for page in table})
        assert set(pool.idle()) <= pool.kept()
