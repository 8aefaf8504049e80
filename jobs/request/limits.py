"""Limits of a whole batch: budgets of tokens, GPU time and energy, and a share of rows that may fail."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from nightmill.jobs.errors import InvalidParameterError

LIMIT_KEYS = ("budget", "max_failures")
LEAST_SAMPLE = 50
"""Rows that must have ended before their failures are compared with the limit."""
HELP = {
    "budget": "Most that the batch may use: 20M-tokens, 4gpu-hours, 5kWh, or several with commas; none: no "
    "limit. Rows that are queued then end with the stop reason budget.",
    "max_failures": f"Share of failed rows, such as 5%, above which the batch stops, once {LEAST_SAMPLE} "
    "have ended; none: no limit.",
}

_NONE = "none"
_PART = re.compile(r"(\d+(?:\.\d+)?)([kMG]?)-?(tokens?|gpu-hours?|k?Wh)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_MULTIPLES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_JOULES_A_WH = 3600.0
_SECONDS_AN_HOUR = 3600.0
_MOST = 1e18
_FORMS = "write 20M-tokens, 4gpu-hours or 5kWh, several with commas, or none"

TOKENS, GPU_SECONDS, JOULES = "tokens", "gpu_seconds", "joules"
MEASURES = (TOKENS, GPU_SECONDS, JOULES)
"""Measures that a budget may limit, by the names that a row of `batches` stores."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits as they were given; None: nothing was said about this limit.

    budget        by measure; empty: there is to be no budget
    max_failures  a share from 0 to 1; 1: any number of rows may fail
    """

    budget: Mapping[str, float] | None = None
    max_failures: float | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Read the limits among the settings of a batch; raises InvalidParameterError."""
        budget, share = (settings.get(name) for name in LIMIT_KEYS)
        return cls(
            None if budget is None else read_budget(budget), None if share is None else _read_share(share)
        )

    @property
    def given(self) -> bool:
        """True if there is a limit, or one is to be removed."""
        return self.budget is not None or self.max_failures is not None


def without_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a batch that are not limits."""
    return {name: value for name, value in settings.items() if name not in LIMIT_KEYS}


def read_budget(value: Any) -> dict[str, float]:
    """Parse a budget into its limits by measure; raises InvalidParameterError."""
    if not isinstance(value, str):
        raise _refusal("budget", value, _FORMS)
    found: dict[str, float] = {}
    parts = [] if value.strip() == _NONE else value.split(",")
    for part in parts:
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise _refusal("budget", value, _FORMS)
        measure, amount = _amount(*match.groups())
        if measure in found:
            raise _refusal("budget", value, "name each measure once")
        if not 0 < amount <= _MOST:
            raise _refusal("budget", value, f"give more than nothing, and at most {_MOST:g}")
        found[measure] = amount
    return found


def _amount(number: str, multiple: str, unit: str) -> tuple[str, float]:
    amount = float(number) * _MULTIPLES[multiple]
    if unit.startswith("token"):
        return TOKENS, round(amount)
    if unit.startswith("gpu"):
        return GPU_SECONDS, amount * _SECONDS_AN_HOUR
    return JOULES, amount * _JOULES_A_WH * (1000 if unit == "kWh" else 1)


def _read_share(value: Any) -> float:
    if isinstance(value, str) and value.strip() == _NONE:
        return 1.0
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or float(match[1]) > 100:
        raise _refusal("max_failures", value, "write a share of the rows from 0% to 100%, or none")
    return float(match[1]) / 100


def _refusal(name: str, value: Any, remedy: str) -> InvalidParameterError:
    what = "is not a share of rows" if name == "max_failures" else "is not a budget"
    return InvalidParameterError(f"{name}: {str(value)[:100]!r} {what}; {remedy}", field=name)


def describe_amount(measure: str, amount: float) -> str:
    """Format an amount of a measure for people: 20,000,000 tokens, 4 GPU hours, 5 kWh."""
    if measure == TOKENS:
        return f"{round(amount):,} tokens"
    if measure == GPU_SECONDS:
        return f"{amount / _SECONDS_AN_HOUR:,.4g} GPU hours"
    return f"{amount / _JOULES_A_WH / 1000:,.4g} kWh"


def describe_share(share: float) -> str:
    """Format a share of rows for people: 5%."""
    return f"{share * 100:.4g}%"


def exceeded(
    budget: Mapping[str, float] | None,
    spent: Mapping[str, float],
    max_failures: float | None,
    ended: int,
    failed: int,
) -> str | None:
    """Return a sentence on the first limit that is met, None if there is none.

    spent   by measure
    ended   rows that were compared with the limit of failures, `failed` of them in vain
    """
    for measure, most in (budget or {}).items():
        used = spent.get(measure, 0)
        if used >= most:
            return (
                f"its budget of {describe_amount(measure, most)} is used up "
                f"({describe_amount(measure, used)} spent)"
            )
    if max_failures is not None and ended >= LEAST_SAMPLE and failed > max_failures * ended:
        return f"{failed:,} of {ended:,} rows failed, more than the limit of {describe_share(max_failures)}"
    return None
