"""Finds out by trying whether drafts pay: tokens per second of steps with them, and of steps without.

What a draft costs hangs on model, GPU and number of sequences, and what it gains on the texts. So nothing is
assumed: some steps are timed in one way and some in the other, apart for each doubling of sequences; then
the better way is gone, and the other is tried again now and then. No text changes, whichever it is.

Prompts and changes of the number interrupt what is timed, which then goes on; a way that cannot be timed to
its end is left. A step that takes far longer than its like, as the first of its shape does on a GPU, whose
graph is captured then, counts as they do: drafts have many shapes, each of which is new once.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["PATIENCE", "RETRY", "SETTLING", "WINDOW", "Payoff"]

WINDOW = 32
"""Launches that are timed together."""
SETTLING = 4
"""Launches before them that do not count, since some were planned in the other way."""
RETRY = 32
"""Windows after which the way that was worse is tried again: if it takes twice as long, that costs 3%."""
PATIENCE = 8 * WINDOW
"""Launches after which a way is left that could not be timed, as each time too few came together."""
_FAR = 3.0
"""Times the median of a window, above which a step's time is not of its kind."""
_GAIN = 1.03
"""Drafts have to be better by this: so that what is timed twice by chance does not decide."""


@dataclass(slots=True)
class _Trials:
    """Steps of so many sequences: the way that they go, and tokens per second of each way.

    of       tokens per second without drafts and with them
    waited   windows since the worse way was tried
    spent    launches of the present window, those included that do not count
    seconds  of each of those that do; `tokens`: of all these
    """

    drafting: bool = False
    of: dict[bool, float] = field(default_factory=dict)
    waited: int = 0
    spent: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def pays(self) -> bool:
        """True if drafts are known to be better."""
        return len(self.of) == 2 and self.of[True] > _GAIN * self.of[False]

    def launched(self, tokens: int, seconds: float) -> None:
        """Count a launch; after the last of a window choose the way of the next."""
        self.tokens += tokens
        self.seconds.append(seconds)
        if len(self.seconds) < WINDOW:
            return
        if took := self._took():
            rate, known = self.tokens / took, self.of.get(self.drafting)
            self.of[self.drafting] = rate if known is None else (known + rate) / 2
        self.begin(self._next())

    def leave(self) -> None:
        """Go on without drafts, or as is known to be better."""
        self.begin(self.pays)

    def begin(self, drafting: bool) -> None:
        """Begin a window."""
        self.drafting = drafting
        self.spent = self.tokens = 0
        self.seconds.clear()

    def _took(self) -> float:
        """Seconds of the window."""
        usual = statistics.median(self.seconds)
        return sum(usual if one > _FAR * usual > 0.0 else one for one in self.seconds)

    def _next(self) -> bool:
        """Return whether the next window has drafts; first one without is timed, then one with them."""
        if len(self.of) < 2:
            return bool(self.of)
        self.waited += 1
        if self.waited < RETRY:
            return self.pays
        self.waited = 0
        return not self.pays


class Payoff:
    """Says whether steps are to have drafts. `clock`: seconds of a monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._trials: dict[int, _Trials] = {}
        self._now = _Trials()  # of the present number of sequences
        self._settled = 0  # launches since anything changed
        self._last = 0.0

    @property
    def drafting(self) -> bool:
        """True if steps are to have drafts."""
        return self._now.drafting

    def drew(self, sequences: int, tokens: int) -> None:
        """A launch of drawn tokens alone was collected, by which so many sequences got `tokens` tokens."""
        trials = self._trials.setdefault(sequences.bit_length(), _Trials())
        if trials is not self._now:
            self._now, self._settled = trials, 0
            return
        way, last, self._last = trials.drafting, self._last, self._clock()
        self._settled += 1
        trials.spent += 1
        if self._settled > SETTLING:
            trials.launched(tokens, self._last - last)
        if trials.spent >= PATIENCE:
            trials.leave()
        if not trials.spent or trials.drafting is not way:
            self._settled = 0

    def interrupt(self) -> None:
        """A launch had prompts, or many sequences run: it is not timed, nor are the next that settle."""
        self._settled = 0
