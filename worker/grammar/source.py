"""What a row asks for as a grammar in Lark's syntax, as llguidance reads it."""

import json
from typing import Any, Final

from llguidance import regex_to_lark

from nightmill.jobs.contract import Constrained, ConstraintKind
from nightmill.worker.grammar.calls import calls_lark

WHITESPACE: Final = r" |\n {0,12}"
"""What may stand between two marks of JSON: nothing, a blank, or a line's end and an indentation.

A weak model that likes blanks comes to its next mark all the same.
"""

_JSON: Final[dict[str, Any]] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,  # `anyOf` in its place would let answers through that do not validate
    "lenient": False,  # a keyword that is not enforced is an error
}
# Where a text can go on in one way only, llguidance would allow one spelling of that in tokens. The model may
# spell it as it likes: else masks would depend on a tokenizer, and on what was looked at before.
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}\n'


def lark_of(asked: Constrained) -> str:
    """The grammar; one that the row itself brings may still be GBNF."""
    match asked.kind:
        case ConstraintKind.JSON_SCHEMA:
            # The key is llguidance's own; what a row says there does not count.
            schema = json.loads(asked.text) | {"x-guidance": _JSON}
            return f"start: %json {json.dumps(schema)}"
        case ConstraintKind.REGEX:
            return f"start: /{regex_to_lark(asked.text, use_ascii='d')}/"
        case ConstraintKind.CHOICE:
            # A terminal: the lexer tells thousands apart at no cost, the parser would follow each.
            return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(asked.text)))
        case ConstraintKind.GRAMMAR:
            return asked.text
        case ConstraintKind.CALLS:
            return calls_lark(asked.text, _JSON)
    raise ValueError(f"{asked.kind} is not known")


def complete(lark: str) -> str:
    """A checked grammar as it is compiled."""
    return lark + _OPTIONS
