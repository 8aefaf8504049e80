"""A reader of pieces ends with the whole text, however they come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.errors import InvalidParameterError, StreamChangedError
from nightmill.jobs.streams.pieces import START, Cursor, GapError, Piece, TextPosition

texts = st.text(st.sampled_from("abé€\n\U0001f600"), max_size=40)


@given(texts, st.data())
def test_pieces_joined_are_the_text_whatever_is_lost_repeated_or_begun_again(
    text: str, data: st.DataObject
) -> None:
    """Each source begins at the beginning and gets as far as it gets; readers leave and come back."""
    cursor, read = Cursor(), ""
    for _ in range(data.draw(st.integers(0, 5))):
        at = 0
        while at < len(text):
            if data.draw(st.booleans(), "reconnect"):
                cursor = Cursor(TextPosition.parse(str(cursor.place)))
                at = 0
            length = data.draw(st.integers(1, len(text) - at))
            fate = data.draw(st.sampled_from(["arrives", "arrives", "lost", "source dies"]))
            if fate == "source dies":
                break
            if fate == "arrives":
                try:
                    piece = cursor.read(at, text[at : at + length])
                except GapError:
                    break
                if piece is not None:
                    assert (piece.start, str(piece.place)) == (len(read), str(cursor.place))
                    read += piece
            at += length
        assert text.startswith(read)
    read += cursor.finish(text) or ""
    assert read == text
    assert cursor.place == START.past(text)
    assert cursor.finish(text) is None


@given(texts, texts, st.integers(0, 40), st.integers(1, 5))
def test_a_text_that_is_another_than_was_read_is_an_error(
    text: str, other: str, length: int, step: int
) -> None:
    before = text[:length]
    place = START.past(before)
    same = other.startswith(before)
    if same:
        assert Cursor(place).finish(other) in (other[len(before) :], None)
    else:
        with pytest.raises(StreamChangedError):
            Cursor(place).finish(other)
    cursor, read = Cursor(place), before
    try:
        for at in range(0, len(other), step):
            read += cursor.read(at, other[at : at + step]) or ""
        assert same or len(other) < len(before)
    except StreamChangedError:
        assert not same
        assert read == before, "nothing is given out of a text that does not go on from what was read"


def test_a_piece_is_a_str_that_knows_its_place() -> None:
    piece = Piece("né", START.past("Sé").past("né"))
    assert (piece, piece + "e", piece.start, piece.place.characters) == ("né", "née", 2, 4)
    assert TextPosition.parse(str(piece.place)) == piece.place == START.past("Séné")


@pytest.mark.parametrize("text", ["", "4", "4-", "-1-00000000", "4-0000000g", "4-00000000 ", "x" * 99])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError, match="after: must be the place of a piece"):
        TextPosition.parse(text)
