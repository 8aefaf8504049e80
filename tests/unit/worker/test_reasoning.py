"""How many tokens of an answer are thoughts."""

import pytest

from nightmill.jobs.base.contract import Markup
from nightmill.jobs.reply.reasoning import CHANNELS
from nightmill.worker.service.reasoning import reasoning_tokens

THINK = ("<think>", "</think>")


def count(*pieces: str, marks: tuple[str, str] | None = THINK, opened: bool = False) -> int:
    """Of an answer whose tokens are these pieces."""
    spelt = [piece.encode() for piece in pieces]
    return reasoning_tokens(range(len(spelt)), Markup(None, marks, opened), lambda one: (spelt[one], ""))


@pytest.mark.parametrize(
    ("pieces", "opened", "expected"),
    [
        (("<think>", "hm", "</think>", "Yes"), False, 3),
        (("<", "think", ">", "hm", "</", "think", ">", "Yes"), False, 7),
        (("\n", "<think>", "hm", "</think>", "\n\n", "Yes", "<think>"), False, 4),
        (("hm", "</think>", "Yes"), True, 2),
        (("<think>", "hm", " and"), False, 3),  # cut in the middle of a thought
        (("<think>", "hm", ""), False, 2),  # what ends a text is no thought
        (("Yes", "<think>", "hm", "</think>"), False, 0),
        (("<think",), False, 0),
        ((), True, 0),
    ],
)
def test_tokens_count_up_to_the_end_of_the_thoughts(
    pieces: tuple[str, ...], opened: bool, expected: int
) -> None:
    assert count(*pieces, opened=opened) == expected


def test_channels_are_thoughts_too() -> None:
    begin, end = CHANNELS
    assert count(begin, "hm", end, "Yes", marks=CHANNELS) == 3
    assert count("<|channel|>final<|message|>", "Yes", marks=CHANNELS) == 0


def test_an_answer_without_marks_has_none() -> None:
    assert count("<think>", "hm", "</think>", marks=None) == 0
    assert reasoning_tokens((1, 2), None, lambda one: (b"x", "")) == 0
