"""Says in a schema what its parser would otherwise get wrong: bounds of numbers, patterns, and dates.

llguidance holds bounds as doubles, reads those of more than 15 digits with an error in the last place, and
allows a number that is equal to an exclusive bound where both bounds have the same whole part. Bounds are
therefore rewritten as inclusive ones that it reads exactly, on the inner side: each number that is generated
obeys the schema. Lost are numbers within 1e-12 of an exclusive bound, and some next to bounds of many digits.
"""

import math
from collections.abc import Callable, MutableMapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final, TypeGuard, cast

from nightmill.jobs.request.schemas import (
    MOST_DECIMALS,
    MOST_DIGITS,
    REFUSED,
    WHOLE_NUMBERS,
    SchemaPath,
    closes,
    reachable,
    says_nothing,
)
from nightmill.worker.grammar.patterns import for_strings

_INSIDE: Final = Decimal("1e-12")
"""The least distance of an inclusive bound from the exclusive one that it stands for."""
_EXACT: Final = 2**53
"""Up to here a double holds each whole number, and up to 2^63 each multiple of the next."""
_COARSE: Final = Decimal("1e10")
_LARGE: Final = 10**17
_OUTERMOST: Final = int(math.nextafter(float(WHOLE_NUMBERS), 0.0))
_HIGH: Final = Context(prec=800)  # a double has at most 767 digits
_MONTHS: Final = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "02-(?:0[1-9]|1[0-9]|2[0-8])",
)
_DAY: Final = f"(?:{'|'.join(_MONTHS)})"
_YEAR: Final = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # no year 0000
)
_DATE: Final = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = f"{_CLOCK}:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+-]{_CLOCK})"
FORMATS: Final = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}"}
"""Formats of the Gregorian calendar, years 1 to 9999, as regular expressions; without leap seconds, which few
programs can read."""


MOST_PROBES: Final = 64
"""Patterns of keys that are tried, of one schema."""

_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

CanOpen = Callable[[dict[str, Any]], bool]
"""Returns True if an object of this schema can have a key."""


def make_exact(schema: dict[str, Any], can_open: CanOpen | None = None) -> None:
    """Rewrite a schema in place; raises ValueError where its bounds leave no number.

    can_open  if given, patterns of keys that match named properties alone are left out: an object could come
              to a comma behind which no key can stand
    """
    probes = 0
    for place, part in list(reachable(schema)):
        mutable = cast(MutableMapping[str, Any], part)  # a schema that was read from JSON
        _leave_out(mutable)
        _rewrite_bounds(place, mutable)
        _rewrite_patterns(place, mutable)
        patterns, names = part.get("patternProperties"), part.get("properties")
        if can_open is not None and isinstance(patterns, dict) and isinstance(names, dict):
            for pattern in list(patterns):
                probes += 1
                if probes > MOST_PROBES:
                    raise ValueError(
                        f"patternProperties at {place} is one of more than {MOST_PROBES} patterns beside "
                        "properties, which are not looked through for keys that they leave: join patterns"
                    )
                if not can_open(_alone(pattern, names)):
                    del patterns[pattern]
        if isinstance(format := part.get("format"), str) and format in FORMATS:
            del mutable["format"]
            mutable["allOf"] = [*part.get("allOf", ()), {"pattern": f"^{FORMATS[format]}$"}]


def _leave_out(part: MutableMapping[str, Any]) -> None:
    """Keywords that say nothing where they stand, or the same as one that the parser knows."""
    idle = [name for name in part if name in REFUSED and says_nothing(part, name)]
    closing = [name for name in part if name in REFUSED and name not in idle and closes(part, name)]
    for name in (*idle, *closing):
        del part[name]
    if "unevaluatedProperties" in closing:
        part["additionalProperties"] = False
    if "unevaluatedItems" in closing:
        part["additionalItems" if "items" in part else "items"] = False
    for name in _COUNTS:
        if isinstance(value := part.get(name), float) and value.is_integer():
            part[name] = int(value)


def _alone(pattern: str, names: dict[str, Any]) -> dict[str, Any]:
    """Objects whose keys match the pattern and are not among the names."""
    return {
        "type": "object", "properties": dict.fromkeys(names, False), "patternProperties": {pattern: True},
        "additionalProperties": False,
    }  # fmt: skip


def _rewrite_patterns(place: SchemaPath, part: MutableMapping[str, Any]) -> None:
    try:
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = for_strings(pattern)
        if isinstance(properties := part.get("patternProperties"), dict):
            part["patternProperties"] = {for_strings(name): value for name, value in properties.items()}
    except ValueError as error:
        raise ValueError(f"the pattern at {place}: {error}") from None


def _rewrite_bounds(place: SchemaPath, part: MutableMapping[str, Any]) -> None:
    types = part.get("type")
    whole = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    low, high = _bound(part, "minimum", 1, whole), _bound(part, "maximum", -1, whole)
    if whole and low is not None and high is None and low >= _LARGE:
        high = Decimal(_OUTERMOST)  # the parser knows no other end of such a range
    if whole and high is not None and low is None and high <= -_LARGE:
        low = Decimal(-_OUTERMOST)
    for name, value in (("minimum", low), ("maximum", high)):
        if value is not None:
            part[name] = int(value) if value == int(value) else float(value)
    if low is not None and high is not None and low > high:
        raise ValueError(f"the bounds of {place} leave no number, or none that can be generated exactly")


def _bound(part: MutableMapping[str, Any], name: str, inwards: int, whole: bool) -> Decimal | None:
    """The inner one of an inclusive and an exclusive bound, as an inclusive one; removes the exclusive one.

    inwards  1 for the lower bound, -1 for the upper
    """
    exclusive_name = f"exclusive{name.capitalize()}"
    found = []
    if _is_number(value := part.get(name)):
        found.append(_inner(value, inwards, whole=whole))
    if _is_number(value := part.get(exclusive_name)):
        del part[exclusive_name]
        found.append(_inner(value, inwards, whole=whole, exclusive=True))
    return max(found, key=lambda value: inwards * value, default=None)


def _inner(value: float, inwards: int, *, whole: bool, exclusive: bool = False) -> Decimal:
    """The outermost number within a bound that the parser reads exactly."""
    rounding = ROUND_CEILING if inwards > 0 else ROUND_FLOOR
    if whole:
        first = math.ceil(inwards * value)
        return Decimal(_inner_double(inwards * (first + (exclusive and first == inwards * value)), inwards))
    exact = Decimal(repr(value))
    if exclusive:
        exact = _HIGH.add(exact, inwards * _INSIDE)
    if abs(exact) >= _EXACT:
        outermost = Decimal(_OUTERMOST).quantize(_COARSE, ROUND_FLOOR)
        return _clipped(exact.quantize(_COARSE, rounding, context=_HIGH), outermost, inwards)
    digits = Context(prec=MOST_DIGITS, rounding=rounding).plus(exact)
    return digits.quantize(Decimal(1).scaleb(-MOST_DECIMALS), rounding, context=_HIGH)


def _inner_double(value: int, inwards: int) -> int:
    value = int(_clipped(Decimal(value), Decimal(_OUTERMOST), inwards))
    made = int(float(value))
    return int(math.nextafter(float(value), inwards * math.inf)) if inwards * made < inwards * value else made


def _clipped(value: Decimal, outermost: Decimal, inwards: int) -> Decimal:
    return max(value, -outermost) if inwards > 0 else min(value, outermost)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
