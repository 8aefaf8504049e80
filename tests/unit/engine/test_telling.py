"""What is told of a text while it grows."""

from nightmill.worker.engine.deltas import FollowedText
from nightmill.worker.engine.request import Sequence
from tests.unit.engine.by_definition import PIECES, PieceStream
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request, run
from tests.unit.engine.test_stops import Letters


def told(telling: FollowedText, *tokens: int) -> tuple[int, str] | None:
    """What a telling says of a sequence that has drawn these tokens."""
    delta = telling.more(Sequence(make_request(prompt=(0, 1, 2)), 1, [0, 1, 2, *tokens], 64))
    return delta and (delta.start, delta.text)


def test_a_character_is_told_once_it_is_whole() -> None:
    telling = FollowedText(1, (), PieceStream())
    first, second = PIECES.index(b"\xc3"), PIECES.index(b"\xa9")
    assert told(telling, 0) == (0, "a")
    assert told(telling, 0, first) is None
    assert told(telling, 0, first) is None
    assert told(telling, 0, first, second) == (1, "é")


def test_what_may_begin_a_stop_string_is_told_once_it_does_not() -> None:
    letters = FollowedText(1, ("STOP",), Letters(["one S", "TO", "x", "ST"]))
    assert told(letters, 0) == (0, "one ")
    assert told(letters, 0, 1) is None
    assert told(letters, 0, 1, 2) == (4, "STOx")
    assert told(letters, 0, 1, 2, 3) is None


def test_characters_that_sql_cannot_hold_are_told_as_the_row_will_have_them() -> None:
    assert told(FollowedText(1, (), Letters(["a\x00b"])), 0) == (0, "a\ufffdb")


def test_a_job_that_is_followed_late_or_again_is_told_from_its_beginning() -> None:
    engine = make_engine(ScriptedRunner())
    engine.submit(make_request(seed=5, max_tokens=40, ignore_eos=True))
    for _ in range(6):
        engine.step()
    assert engine.deltas() == [] and not engine.followed
    engine.follow(["j"])
    (whole,) = engine.deltas()
    assert (whole.start, whole.text[:3]) == (0, engine.partial("j").text[:3])  # type: ignore[union-attr]
    engine.follow([])
    engine.follow(["j", "another"])
    assert engine.deltas() == [whole] and engine.followed
    assert run(engine)[0].text.startswith(whole.text)
