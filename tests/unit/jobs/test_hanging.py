"""A broker that hangs costs one caller its time, and others are refused at once."""

import pytest

from nightmill.jobs.errors import BrokerUnreachableError
from nightmill.jobs.messages.hanging import HangGuard, SilentBrokerError


class Hand:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def _fail(guard: HangGuard, hand: Hand, seconds: float) -> None:
    with pytest.raises(BrokerUnreachableError), guard.passing():
        hand.time += seconds
        raise BrokerUnreachableError("away")


def _use(guard: HangGuard) -> bool:
    try:
        with guard.passing():
            return True
    except SilentBrokerError:
        return False


def test_after_a_hang_others_are_refused_for_a_while() -> None:
    hand = Hand()
    guard = HangGuard(hand)
    _fail(guard, hand, 5.0)
    assert not _use(guard)
    hand.time += 4.0
    assert not _use(guard)
    hand.time += 1.5
    assert _use(guard)
    assert _use(guard)


def test_one_at_a_time_tries_again() -> None:
    hand = Hand()
    guard = HangGuard(hand)
    _fail(guard, hand, 5.0)
    hand.time += 6.0
    with guard.passing():
        assert not _use(guard)
    assert _use(guard)
    _fail(guard, hand, 5.0)
    hand.time += 6.0
    _fail(guard, hand, 0.0)  # it refuses now: that is no proof that it answers
    assert not _use(guard)


def test_a_broker_that_refuses_at_once_is_asked_every_time() -> None:
    hand = Hand()
    guard = HangGuard(hand)
    for _ in range(3):
        _fail(guard, hand, 0.1)
    assert _use(guard)


def test_another_error_says_nothing_of_the_broker() -> None:
    hand = Hand()
    guard = HangGuard(hand)
    _fail(guard, hand, 5.0)
    hand.time += 6.0
    with pytest.raises(KeyboardInterrupt), guard.passing():
        raise KeyboardInterrupt
    assert _use(guard)
