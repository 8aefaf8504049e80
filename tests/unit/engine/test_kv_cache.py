"""The page pool: counting, and an audit that notices every kind of fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.kv_cache import BlockPool, CacheIntegrityError


def test_pages_are_taken_and_given_back() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(3)
    assert (pool.free, pool.used, len(set(table))) == (1, 3, 3)
    pool.check_integrity([table])
    pool.release(table)
    assert pool.free == 4
    pool.check_integrity([])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert BlockPool(4, 16).pages_for(tokens) == pages


def test_more_pages_than_free_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(ValueError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    assert pool.free == 2


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    pool.share(table)
    pool.check_integrity([table, table])
    pool.release(table)
    assert pool.free == 1
    pool.release(table)
    assert pool.free == 2


def test_a_page_cannot_be_released_twice_or_shared_when_free() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(table)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(table)


def test_audit_notices_faults() -> None:
    pool = BlockPool(3, 16)
    table = pool.allocate(2)
    for tables in ([], [table, table], [table[:1]], [[*table, 2]], [[*table, 99]]):
        with pytest.raises(CacheIntegrityError):
            pool.check_integrity(tables)
    pool._free.append(pool._free[0])
    with pytest.raises(CacheIntegrityError, match="times in the free list"):
        pool.check_integrity([table])


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (1, 0), (-1, 16)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs pages"):
        BlockPool(blocks, size)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 5)), max_size=60))
def test_any_sequence_of_operations_keeps_the_books(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(7, 4)
    tables: list[list[int]] = []
    for operation, number in operations:
        if operation == "take" and number <= pool.free:
            tables.append(pool.allocate(number))
        elif tables and operation == "share":
            shared = tables[number % len(tables)]
            pool.share(shared)
            tables.append(list(shared))
        elif tables and operation == "drop":
            pool.release(tables.pop(number % len(tables)))
        pool.check_integrity(tables)
        assert pool.used == len({page for table in tables for page in table})
