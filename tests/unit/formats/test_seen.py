"""The table of custom_ids finds exactly what was put in."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.formats.seen import SeenIds


@given(st.lists(st.text(max_size=3), max_size=200))
def test_an_id_is_known_with_the_row_that_had_it_first(ids: list[str]) -> None:
    seen, known = SeenIds(), dict[str, int]()
    for row, custom_id in enumerate(ids, 1):
        assert seen.add(custom_id, row) == known.get(custom_id)
        known.setdefault(custom_id, row)


def test_thousands_of_ids_are_told_apart_in_a_few_bytes_each() -> None:
    tracemalloc.start()
    seen = SeenIds()
    assert all(seen.add(f"request-{row}", row) is None for row in range(1, 30_001))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(seen.add(f"request-{row}", 0) == row for row in range(1, 30_001))
    assert held <= 36 * 30_000
