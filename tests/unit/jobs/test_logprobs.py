"""How a row keeps log-probabilities."""

import math
from array import array

import pytest

from nightmill.jobs.reply.logprobs import LEAST, LikelyToken, TokenLogprob, offsets, pack, read

SPELLINGS = {5: (b"\xe2\x82", ""), 7: (b"\xac!", ""), 9: (b"", "<end>"), 11: ("grün".encode(), "")}
NAN, INFINITE = math.nan, -math.inf


def records(*rows: tuple[float, list[int], list[float]]) -> bytes:
    return b"".join(
        array("f", [own]).tobytes() + array("i", ids).tobytes() + array("f", theirs).tobytes()
        for own, ids, theirs in rows
    )


def test_what_is_packed_is_read_again() -> None:
    made = records(
        (NAN, [-1, -1], [0.0, 0.0]), (-0.5, [7, 9], [-0.5, -2.0]), (INFINITE, [11, -1], [0.0, 0.0])
    )
    data = pack([5, 7, 11], made, 2, SPELLINGS.__getitem__)
    end = LikelyToken("<end>", -2.0, b"", 9)
    assert read(data) == (
        TokenLogprob("\ufffd", None, b"\xe2\x82", 5, 0),
        TokenLogprob("\ufffd!", -0.5, b"\xac!", 7, 0, (LikelyToken("\ufffd!", -0.5, b"\xac!", 7), end)),
        TokenLogprob("grün", LEAST, "grün".encode(), 11, 2, (LikelyToken("grün", 0.0, "grün".encode(), 11),)),
    )
    assert read(pack([], b"", 0, SPELLINGS.__getitem__)) == ()


def test_what_nobody_packed_is_read_as_nothing() -> None:
    data = pack([5, 7], records((-1.0, [], []), (-2.0, [], [])), 0, SPELLINGS.__getitem__)
    assert read(data) is not None
    for spoilt in (b"", b"\x02" + data[1:], data[:-1], data[:9], data[:12] + b"\xff\xff\xff\x7f" + data[16:]):
        assert read(spoilt) is None


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], []),
        ([b"a", b"bc", b""], [0, 1, 3]),
        ([b"\xc3", b"\xa9", b"x"], [0, 0, 1]),
        ([b"\xff", b"x"], [0, 1]),
    ],
)
def test_offsets_count_whole_characters(pieces: list[bytes], expected: list[int]) -> None:
    assert offsets(pieces) == expected
