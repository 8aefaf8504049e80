"""Groups of rows: bounded in number and in text, nothing lost, nothing read ahead."""

from collections.abc import Iterator

import pytest

from nightmill.jobs.batches.grouping import CHARACTERS_PER_TRANSACTION, characters, grouped

HALF = CHARACTERS_PER_TRANSACTION // 2


def sizes(rows: list[int]) -> list[list[int]]:
    return list(grouped(rows, lambda row: row))


def test_a_group_ends_at_so_many_rows_or_at_so_much_text() -> None:
    assert [len(group) for group in sizes([1] * 2500)] == [1024, 1024, 452]
    assert sizes([HALF, HALF, 1, HALF * 4, 1, 1]) == [[HALF, HALF], [1, HALF * 4], [1, 1]]
    assert sizes([]) == []


def test_no_row_is_read_before_the_group_that_is_full_is_used() -> None:
    read = []

    def rows() -> Iterator[int]:
        for row in (HALF, HALF, 1):
            read.append(row)
            yield row

    assert next(grouped(rows(), lambda row: row)) == [HALF, HALF]
    assert read == [HALF, HALF]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("four", 4),
        ([{"role": "user", "content": "four"}], 8),
        ({"messages": [{"content": [{"type": "text", "text": "12345"}]}], "max_tokens": 5}, 15),
        ({"prompt": "four", "stop": ("a", "b")}, 6),
        (None, 0),
        (7, 6),
        ([1, 2, 3], 18),
    ],
)
def test_all_text_is_counted_wherever_it_is(value: object, expected: int) -> None:
    assert characters(value) == expected


def test_a_value_nested_without_end_is_no_danger() -> None:
    value: list[object] = []
    value.append(value)
    assert characters(value) == 0
