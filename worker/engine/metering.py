"""Shares out the cost of steps, in seconds and joules, among the sequences that they computed.

The time from the end of one step to that of the next is shared by the tokens that it computed: those of
prompts and those that were drawn, each by its cost, which is found from the steps before. So what is computed
for nobody (padding, tokens of texts that have ended meanwhile) and what the host takes between two steps are
charged to all who are in the step, by their shares. Time without any work is charged to nobody.

Energy is read from a counter, a few times a second: it grows less often than steps end, and rows that end
cannot wait for it. So a step is charged with its seconds at the power of the last reading, and what that was
too much or too little is added to the charge of the steps until the next. The sum of all charges thus follows
the counter, and is off by no more than one interval's change of power.
"""

from collections.abc import Callable
from typing import Protocol

from nightmill.worker.engine.plan import StepPlan
from nightmill.worker.engine.request import SequenceState

READ_SECONDS = 0.2
"""Least time between two readings of the counter: NVML's counter grows some ten to fifty times a second."""
PROMPT_SHARE = 0.25
"""Cost of a token of a prompt, in those of a drawn one, until steps have shown it."""
_LEAST_SHARE = 1e-3
_MEMORY = 0.98  # of what earlier steps showed, at each step
_APART = 0.02  # how different steps must be to show the two costs: 1 less the squared cosine of their counts


class EnergyCounter(Protocol):
    """Counts what a device has consumed."""

    def joules(self) -> float | None:
        """Return the energy since some moment; None if the device does not tell."""
        ...


class Presence(Protocol):
    """Is told when an engine has work, where several share a device."""

    def begin(self) -> None:
        """It has work from now on."""
        ...

    def rest(self) -> None:
        """It has no work any more."""
        ...


class TokenCosts:
    """The cost of a token of a prompt, in those of a drawn one, by least squares over the last steps.

    seconds = prompt cost * prompt tokens + draw cost * drawn tokens
    """

    def __init__(self) -> None:
        self._pp = self._pd = self._dd = self._ps = self._ds = 0.0

    def observe(self, prompt_tokens: int, drawn: int, seconds: float) -> None:
        """Learn from a step."""
        for name, value in (
            ("_pp", prompt_tokens * prompt_tokens), ("_pd", prompt_tokens * drawn), ("_dd", drawn * drawn),
            ("_ps", prompt_tokens * seconds), ("_ds", drawn * seconds),
        ):  # fmt: skip
            setattr(self, name, _MEMORY * getattr(self, name) + value)

    @property
    def prompt_share(self) -> float:
        """The cost of a token of a prompt, where a drawn one costs 1."""
        apart = self._pp * self._dd - self._pd * self._pd
        if apart <= _APART * self._pp * self._dd:
            return PROMPT_SHARE
        prompt = self._ps * self._dd - self._ds * self._pd
        draw = self._ds * self._pp - self._ps * self._pd
        if draw <= 0.0:
            return 1.0
        return min(1.0, max(_LEAST_SHARE, prompt / draw))


class PowerBill:
    """Charges for seconds so that all charges together follow a counter of energy."""

    def __init__(self) -> None:
        self.charged = 0.0
        """Joules charged so far."""
        self._counted = 0.0  # that were to be charged
        self._power = 0.0  # W, of the last interval
        self._rate = 0.0  # W, that are charged now

    def charge(self, seconds: float) -> float:
        """Return the joules to charge for so many seconds of work; never negative."""
        joules = self._rate * seconds
        self.charged += joules
        return joules

    def count(self, joules: float, seconds: float) -> None:
        """Take in what was consumed in the last interval, so many seconds of work."""
        if joules < 0.0 or seconds <= 0.0:
            return
        self._counted += joules
        self._power = joules / seconds
        self._rate = max(0.0, self._power + (self._counted - self.charged) / max(seconds, READ_SECONDS))


class Metering:
    """The meter of one engine.

    counter   of the device's energy; None: only seconds are counted
    clock     seconds of a monotonic clock; where engines share a device, those that are charged to this one
    presence  is told when there is work
    """

    def __init__(
        self, counter: EnergyCounter | None, clock: Callable[[], float], presence: Presence | None = None
    ) -> None:
        self.seconds = 0.0
        """Seconds charged so far."""
        self._resting = True
        self._presence = presence
        self._counter = counter
        self._clock = clock
        self._costs = TokenCosts()
        self._bill = PowerBill()
        self._until = 0.0  # up to which time is accounted for
        self._read_at = 0.0
        self._joules: float | None = None  # of the counter, when it was last read
        self._worked = 0.0  # seconds of work since then

    @property
    def joules(self) -> float | None:
        """Joules charged so far; None if the device does not tell."""
        return None if self._joules is None else self._bill.charged

    @property
    def clock(self) -> Callable[[], float]:
        """Its clock."""
        return self._clock

    def begin(self) -> None:
        """A step is launched. Before the first one there was no work, which is charged to nobody."""
        if self._resting:
            self._resting = False
            if self._presence is not None:
                self._presence.begin()
            self._until = self._clock()
            self._read(idle=True)

    def end(self, plan: StepPlan) -> None:
        """A step has ended: charge those that it computed and that are still there."""
        now = self._clock()
        seconds, self._until = max(0.0, now - self._until), now
        drafted = sum(1 + draft.spare_rows for draft in plan.drafts)
        prompts, drawn = sum(chunk.length for chunk in plan.chunks), len(plan.decodes) + drafted
        share = self._costs.prompt_share
        costs = [
            *((sequence, 1.0) for sequence in plan.decodes),
            *((draft.sequence, 1.0 + draft.spare_rows) for draft in plan.drafts),
            *((chunk.sequence, share * chunk.length) for chunk in plan.chunks),
        ]
        live = [(one, cost) for one, cost in costs if one.state is not SequenceState.FINISHED]
        whole = sum(cost for _, cost in live)
        if whole > 0.0:
            self.seconds += seconds
            each, joules = seconds / whole, self._bill.charge(seconds) / whole
            for sequence, cost in live:
                sequence.seconds += each * cost
                sequence.joules += joules * cost
        self._worked += seconds
        self._costs.observe(prompts, drawn, seconds)
        if self._joules is not None and now - self._read_at >= READ_SECONDS:
            self._read(idle=False)

    def rest(self) -> None:
        """There is no work any more."""
        if not self._resting:
            self._resting = True
            if self._joules is not None:
                self._read(idle=False)
            if self._presence is not None:
                self._presence.rest()

    def _read(self, *, idle: bool) -> None:
        """Read the counter; `idle`: what it has counted since was nobody's work."""
        if self._counter is None:
            return
        found, self._read_at = self._counter.joules(), self._clock()
        if found is not None and self._joules is not None and not idle:
            self._bill.count(found - self._joules, self._worked)
        self._joules, self._worked = found, 0.0
