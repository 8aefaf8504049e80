"""Escaping of text from outside for display: no character may steer a terminal or deceive a reader."""

import logging
import re
from collections.abc import Callable

# Control characters (C0, DEL, C1: ESC and OSC are among them), line and paragraph separators, marks that turn
# the direction of writing, characters without a width, halves of surrogate pairs. The joiners that emoji,
# Arabic and Indian scripts are written with (U+200C, U+200D) stay.
_UNFIT = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CONTINUED = "\n    "


def printable(text: object, limit: int | None = None, *, keep: str = "") -> str:
    """Return `text` on one line with dangerous characters escaped (\x1b, \u202e), cut to `limit` characters.

    Characters in `keep` are not escaped: "\\n\\t" for a text that may have several lines.
    """
    found = str(text)
    if limit is not None:
        found = found[: limit + 1]  # escapes only make it longer
    escaped = _UNFIT.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), found)
    return escaped if limit is None or len(escaped) <= limit else escaped[: limit - 1] + "…"


def json_printable(encoded: str) -> str:
    """Escape the same characters in JSON with JSON's own escapes, so that programs read the same values."""
    return _UNFIT.sub(lambda match: _json_escape(match[0]), encoded)


def _escape(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _json_escape(character: str) -> str:
    pair = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{pair[at : at + 2].hex()}" for at in range(0, len(pair), 2))


class PrintableRecords(logging.Filter):
    """A log filter: messages forge no line, steer no terminal, and show no secret."""

    def __init__(self, scrubbed: Callable[[str], str] = str) -> None:
        super().__init__()
        self._scrubbed = scrubbed
        self._formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the message and its traceback, and indent further lines of the message."""
        record.msg = self._fit(record.getMessage()).replace("\n", _CONTINUED)
        record.args = ()
        if record.exc_info and not record.exc_text:
            record.exc_text = self._fit(self._formatter.formatException(record.exc_info))
        return True

    def _fit(self, text: str) -> str:
        return printable(self._scrubbed(text), keep="\n\t")
