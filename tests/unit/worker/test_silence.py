"""Silence is measured by looks, so that a pause of the one who looks is not taken for the other's."""

from nightmill.jobs.base.silence import Silence


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_silence_lasts_from_the_last_word() -> None:
    clock = Hand()
    silence = Silence(10.0, 5.0, clock)
    for seconds, too_long in ((4.0, False), (4.0, False), (4.0, True)):
        clock.time += seconds
        assert silence.too_long() is too_long
    silence.broken()
    clock.time += 4.0
    assert not silence.too_long()


def test_a_pause_of_the_listener_counts_as_one_look() -> None:
    clock = Hand()
    silence = Silence(10.0, 5.0, clock)
    clock.time += 8 * 3600.0  # the lid was closed
    assert not silence.too_long()
    assert silence.seconds == 5.0
