"""Regular expressions of schemas, which are ECMAScript's, as llguidance is to read them.

In a class of characters, brackets and doubled operators are characters in ECMAScript, but nested classes and
set operations in Rust's syntax; white space is not the same either. And llguidance lets a string hold
quotation marks and backslashes wherever a class has all control characters, as `[^"]` has: so U+0000 is taken
out of each class. It leaves out a control character that stands alone, so such patterns are refused.
"""

import re
from typing import Final

_SYMBOL: Final = re.compile(
    r"""\\(?: x[0-9a-fA-F]{2} | x\{[0-9a-fA-F]*\} | u[0-9a-fA-F]{4} | u\{[0-9a-fA-F]*\}
        | [pP](?:\{[^}]*\}|.) | . )
      | .""",
    re.DOTALL | re.VERBOSE,
)
_CONTROL: Final = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f] | \\[av] | \\(?:x|u00) (?:0[0-7bBeEfF] | 1[0-9a-fA-F] | 7[fF])"
    r"| \\[xu]\{ 0* (?:[0-7bBeEfF] | 1[0-9a-fA-F] | 7[fF])? \}",
    re.VERBOSE,
)
"""Control characters as patterns write them, but for those with a short escape in JSON."""
_NUL: Final = re.compile(r"\x00|\\x00|\\x\{0+\}|\\u0000|\\u\{0+\}")
_OPERATORS: Final = ("&", "~")
_SPACE: Final = (
    r"\t\n\x0b\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
)
_OUTSIDE: Final = {"\\s": f"[{_SPACE}]", "\\S": f"[^\\x00{_SPACE}]"}


def for_strings(pattern: str) -> str:
    """A pattern that matches no string of JSON that the given one does not; ValueError if none is known."""
    made: list[str] = []
    symbols = _SYMBOL.findall(pattern)
    place = 0
    while place < len(symbols):
        symbol = symbols[place]
        if symbol == "[":
            place = _class(symbols, place, made)
        elif symbol.startswith("\\P"):
            made.append(f"[^\\x00\\p{symbol[2:]}]")
            place += 1
        else:
            _refuse_control(symbol)
            made.append(_OUTSIDE.get(symbol, symbol))
            place += 1
    return "".join(made)


def _refuse_control(symbol: str) -> None:
    if _CONTROL.fullmatch(symbol):
        raise ValueError(f"the control character {symbol!r} cannot be generated; leave it out")


def _class(symbols: list[str], place: int, made: list[str]) -> int:
    """Rewrite a class, which begins at `place`, into `made`; returns where it ends."""
    made.append("[")
    place += 1
    if place < len(symbols) and symbols[place] == "^":
        made.append("^\\x00")
        place += 1
    while place < len(symbols):
        symbol, following = symbols[place], symbols[place + 1] if place + 1 < len(symbols) else ""
        place += 1
        if symbol == "]":
            if made[-2] == "[":  # it has one member
                _refuse_control(made[-1])
            made.append("]")
            return place
        if symbol.startswith("\\P"):
            raise ValueError(f"a class of characters may not hold {symbol}; write the class without it")
        if symbol == following == "-":
            raise ValueError("'--' in a class of characters has several readings; write \\-")
        made.append(_member(symbol, following))
    return place  # it does not end, which the parser says


def _member(symbol: str, following: str) -> str:
    if symbol == "[" or (symbol == following and symbol in _OPERATORS):
        return f"\\{symbol}"
    if following == "-" and _NUL.fullmatch(symbol):
        return "\\x01"
    return _SPACE if symbol == "\\s" else symbol
