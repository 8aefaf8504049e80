"""Finds out by trying whether drafts pay: tokens per second of steps with them, and of steps without.

What a draft costs hangs on model, GPU and number of sequences, and what it gains on the texts. So nothing is
assumed: some steps are timed in one way and some in the other, apart for each doubling of sequences; then
the better way is gone, and the other is tried again now and then. No text changes, whichever it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["RETRY", "SETTLING", "WINDOW", "Payoff"]

WINDOW = 32
"""Launches that are timed together."""
SETTLING = 4
"""Launches before them that do not count, since some were planned in the other way."""
RETRY = 32
"""Windows after which the way that was worse is tried again: if it takes twice as long, that costs 3%."""
_GAIN = 1.03
"""Drafts have to be better by this: so that what is timed twice by chance does not decide."""


@dataclass(slots=True)
class _Rates:
    """Tokens per second without drafts and with them, and windows since the worse way was tried."""

    of: dict[bool, float] = field(default_factory=dict)
    waited: int = 0

    def learn(self, drafting: bool, rate: float) -> None:
        """Note a window."""
        known = self.of.get(drafting)
        self.of[drafting] = rate if known is None else (known + rate) / 2

    def choose(self) -> bool:
        """Return whether the next window has drafts; first one without is timed, then one with them."""
        if len(self.of) < 2:
            return bool(self.of)
        better = self.of[True] > _GAIN * self.of[False]
        self.waited += 1
        if self.waited < RETRY:
            return better
        self.waited = 0
        return not better


class Payoff:
    """Says whether steps are to have drafts. `clock`: seconds of a monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.drafting = False
        """Steps are to have drafts."""
        self._clock = clock
        self._rates: dict[int, _Rates] = {}
        self._size = 0  # of the present window: sequences, by doublings
        self._launches = self._tokens = 0
        self._began = 0.0

    def drew(self, sequences: int, tokens: int) -> None:
        """A launch of drawn tokens alone was collected, by which so many sequences got `tokens` tokens."""
        size = sequences.bit_length()
        if size != self._size:
            self._begin(size)
            return
        self._launches += 1
        if self._launches < SETTLING:
            return
        now = self._clock()
        if self._launches == SETTLING:
            self._began, self._tokens = now, 0
            return
        self._tokens += tokens
        if self._launches == SETTLING + WINDOW:
            if now > self._began:
                self._rates[size].learn(self.drafting, self._tokens / (now - self._began))
            self._begin(size)

    def interrupt(self) -> None:
        """A launch had prompts, or many sequences run: what was timed so far counts for nothing."""
        self._launches = 0

    def _begin(self, size: int) -> None:
        self._size, self._launches = size, 0
        self.drafting = self._rates.setdefault(size, _Rates()).choose()
