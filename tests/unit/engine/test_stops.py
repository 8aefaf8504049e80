"""When a text is over, and what of it is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.stops import TextWatch, reason_to_stop, streamed
from tests.unit.engine.by_definition import PIECES, PieceStream, first_stop, stable_prefix, text_of


class Letters:
    """A stream whose tokens are given as text."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    @property
    def whole(self) -> bool:
        return True

    def flush(self) -> str:
        return self.rest


def follow(pieces: list[str], *stop: str, included: bool = False) -> tuple[int, str]:
    """Push until a stop string is found; the number of tokens pushed and the text."""
    watch = TextWatch(Letters(pieces), stop, included=included)
    for token in range(len(pieces)):
        if watch.push(token):
            return token + 1, watch.text
    watch.finish()
    return len(pieces), watch.text


@pytest.mark.parametrize(
    ("pieces", "stop", "tokens", "text"),
    [
        (["one", "STOP", "two"], ["STOP"], 2, "one"),
        (["one", "ST", "OP", "two"], ["STOP"], 3, "one"),
        (["one S", "T", "O", "P two"], ["STOP"], 4, "one "),
        (["one", "ST", "two"], ["STOP"], 3, "oneSTtwo"),  # a false start is kept
        (["SSTO", "P"], ["STOP"], 2, "S"),
        (["a", "\n", "\n", "b"], ["\n\n"], 3, "a"),
        (["xaa", "b"], ["aab", "ab"], 2, "x"),  # same end: the longer one starts first
        (["abc"], ["abc", "b"], 1, "a"),  # complete first wins, however the tokens fall
        (["a", "b", "c"], ["abc", "b"], 2, "a"),
        (["xy", "z"], ["nothing"], 2, "xyz"),
        (["STOP"], ["STOP"], 1, ""),
        (["a€", "b"], ["€b"], 2, "a"),
    ],
)
def test_first_stop_string_ends_the_text(pieces: list[str], stop: list[str], tokens: int, text: str) -> None:
    assert follow(pieces, *stop) == (tokens, text)


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["one", "STOP", "two"], ["STOP"], "oneSTOP"),
        (["one S", "T", "O", "P two"], ["STOP"], "one STOP"),
        (["xaa", "b"], ["aab", "ab"], "xaab"),
        (["abc"], ["abc", "b"], "ab"),  # complete first wins
        (["xy", "z"], ["nothing"], "xyz"),
    ],
)
def test_a_stop_string_that_is_included_ends_the_text(pieces: list[str], stop: list[str], text: str) -> None:
    assert follow(pieces, *stop, included=True)[1] == text


def test_text_that_may_begin_a_stop_string_is_held_back_until_decided() -> None:
    watch = TextWatch(Letters(["one S", "TO", "x", "ST"]), ("STOP",))
    seen = []
    for token in range(4):
        watch.push(token)
        seen.append(watch.decided)
    assert seen == ["one ", "one ", "one STOx", "one STOx"]
    assert not watch.finish()
    assert watch.text == "one STOxST"


def test_bytes_left_at_the_end_can_complete_a_stop_string() -> None:
    watch = TextWatch(Letters(["a"], rest="\ufffd"), ("\ufffd",))
    assert not watch.push(0)
    assert watch.finish()
    assert watch.text == "a"


def test_tokens_after_the_stop_string_change_nothing() -> None:
    watch = TextWatch(Letters(["aSTOP", "b"]), ("STOP",))
    assert watch.push(0)
    assert watch.push(1)
    assert (watch.text, watch.finish(), watch.text) == ("a", True, "a")


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    st.lists(
        st.sampled_from(["ab", "ba", "aba", "é", "€", "é€", "STOP", "STST", "PS", "a", "\ufffd"]),
        min_size=1,
        max_size=4,
    ),
)
def test_stop_strings_do_not_depend_on_token_borders(tokens: list[int], stop: list[str]) -> None:
    watch = TextWatch(PieceStream(), tuple(stop))
    for count, token in enumerate(tokens, 1):
        cut = first_stop(stable_prefix(tokens[:count]), tuple(stop))
        assert watch.push(token) == (cut is not None)
        if cut is not None:
            assert watch.text == watch.decided == stable_prefix(tokens[:count])[:cut]
            return
        assert watch.text == stable_prefix(tokens[:count])
        assert watch.text.startswith(watch.decided)
    cut = first_stop(text_of(tokens), tuple(stop))
    assert watch.finish() == (cut is not None)
    assert watch.text == text_of(tokens)[:cut]


def test_decode_joins_characters_over_token_borders() -> None:
    assert streamed(PieceStream(), [0, 5, 6, 1, 7, 8, 9, 5]) == "aéb€\ufffd"


def test_reasons_in_order_of_precedence() -> None:
    params = GenerationParams(max_tokens=3, stop=("STOP",))
    eos = frozenset({14})

    def reason(
        token: int, generated: int, length: int, params: GenerationParams = params
    ) -> StopReason | None:
        watch = TextWatch(PieceStream(), params.stop)
        return reason_to_stop(
            token, generated=generated, length=length, context=10, params=params, eos_ids=eos, watch=watch
        )

    assert reason(0, 1, 5) is None
    assert reason(14, 3, 10) is StopReason.EOS
    assert reason(11, 3, 10) is StopReason.STOP_SEQUENCE
    assert reason(0, 3, 10) is StopReason.LENGTH
    assert reason(0, 2, 10) is StopReason.CONTEXT_FULL
    assert reason(14, 1, 5, params.model_copy(update={"ignore_eos": True})) is None
