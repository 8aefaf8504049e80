"""The findings of a benchmark, by part."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = ["LOADS", "QUICK_LOADS", "Check", "EqualTexts", "LoadSpeed", "PartReport", "part_of"]


class EqualTexts(NamedTuple):
    """Equal sequences that run at once, by tokens of prompt and answer."""

    sequences: int
    prompt: int
    answer: int


LOADS = tuple(
    EqualTexts(*sizes)
    for sizes in ((1, 128, 128), (8, 128, 128), (64, 256, 128), (256, 512, 128), (256, 512, 1))
)
"""From a single text to the night, and prompts alone."""

QUICK_LOADS = (EqualTexts(1, 128, 64), EqualTexts(64, 128, 64))


@dataclass(frozen=True, slots=True)
class Check:
    """Something that has to hold, and what was found."""

    what: str
    ok: bool
    found: str


@dataclass(frozen=True, slots=True)
class LoadSpeed:
    """A load's tokens per second, drawn and of prompts, over so many seconds.

    cut  the time was up before its end; then there may be more of prompts in it, and less of answers
    """

    load: EqualTexts
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    seconds: float
    cut: bool = False


@dataclass(slots=True)
class PartReport:
    """The findings of a part: of all kernels, of NumPy, or of a format of weights.

    refused       why this machine does not compute it
    seconds       what its steps took
    first_tokens  of the checked texts, by what weights are rounded to
    left_out      loads for which no time was left
    slowest       what took longest, in words
    device        the GPU, where the part has looked at it
    """

    part: str
    refused: str | None = None
    arithmetic: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    speeds: list[LoadSpeed] = field(default_factory=list)
    left_out: list[EqualTexts] = field(default_factory=list)
    slowest: list[str] = field(default_factory=list)
    first_tokens: dict[str, list[int]] = field(default_factory=dict)
    device: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """False if a check failed."""
        return all(check.ok for check in self.checks)

    def took(self, step: str, seconds: float) -> None:
        """Add to what a step took."""
        self.seconds[step] = round(self.seconds.get(step, 0.0) + seconds, 2)

    def failed(self, what: str, found: str) -> None:
        """Add a check that failed."""
        self.checks.append(Check(what, False, found))

    def values(self) -> dict[str, Any]:
        """The report as an object of JSON, without the GPU, which is the same for all."""
        speeds = [asdict(one) | {"load": one.load._asdict()} for one in self.speeds]
        others = {"speeds": speeds, "left_out": [one._asdict() for one in self.left_out], "ok": self.ok}
        found = asdict(self) | others
        del found["device"]
        return found


def part_of(weights: str) -> str:
    """The name of the part of a format of weights."""
    return f"weights {weights}"
