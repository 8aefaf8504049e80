"""The longest of many texts is found at its first place, however many there are."""

import re
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.worker.model.tokenizer.finding import matcher

SHORT = st.text("<|ab[(.", min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.lists(SHORT, min_size=1, max_size=12), st.text("<|ab[(.", max_size=30))
def test_the_leftmost_and_then_longest_is_found(texts: list[str], text: str) -> None:
    one_by_one = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    found = matcher(texts)
    assert found is not None
    assert [match.span() for match in found.finditer(text)] == [
        match.span() for match in one_by_one.finditer(text)
    ]


def test_texts_that_begin_each_other_hundreds_deep_are_found() -> None:
    found = matcher("a" * length for length in range(1, 700))
    assert found is not None
    for length in (1, 23, 24, 25, 699):
        assert found.findall("b" + "a" * length + "b") == ["a" * length]
    assert matcher([]) is None


def test_time_hardly_depends_on_how_many_there_are() -> None:
    text = "<unused " * 10_000 + "<" * 10_000

    def seconds(count: int) -> float:
        found = matcher(f"<unused{number}>" for number in range(count))
        assert found is not None
        found.findall(text)
        start = time.process_time()
        assert found.findall(text) == []
        return time.process_time() - start

    few = min(seconds(8) for _ in range(5))
    assert min(seconds(8_000) for _ in range(5)) < 20 * few  # a thousand times as many
