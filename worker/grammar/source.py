"""Writes the constraint of a row as a grammar in Lark's syntax, as llguidance reads it."""

import json
from functools import partial
from typing import Any, Final

from llguidance import regex_to_lark

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.request.schemas import check_schema
from nightmill.worker.grammar.calls import calls_lark
from nightmill.worker.grammar.exact import CanOpen, make_exact
from nightmill.worker.grammar.gbnf import GbnfError, is_gbnf, to_lark

WHITESPACE: Final = r" |\n {0,12}"
"""Whitespace between two marks of JSON: nothing, a blank, or a line's end and an indentation.

A weak model that likes blanks comes to its next mark all the same.
"""

_JSON: Final[dict[str, Any]] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,  # `anyOf` in its place would let answers through that do not validate
    "lenient": False,  # a keyword that is not enforced is an error
    # One spelling of each character: a key with other escapes would pass for one that no property names.
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
# Where a text can go on in one way only, llguidance would allow one spelling of that in tokens. The model may
# spell it as it likes: else masks would depend on a tokenizer, and on what was looked at before.
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}\n'


def lark_of(asked: Constrained, can_open: CanOpen | None = None) -> str:
    """The grammar. `can_open`: see `make_exact`.

    Raises ValueError, TypeError or KeyError for what cannot be enforced.
    """
    match asked.kind:
        case ConstraintKind.JSON_SCHEMA:
            return lark_of_schema(_enforced(json.loads(asked.text), can_open))
        case ConstraintKind.REGEX:
            return f"start: /{regex_to_lark(asked.text, use_ascii='d')}/"
        case ConstraintKind.CHOICE:
            # A terminal: the lexer tells thousands apart at no cost, the parser would follow each.
            return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(asked.text)))
        case ConstraintKind.GRAMMAR:
            return _lark_of_grammar(asked.text)
        case ConstraintKind.CALLS:
            of_form = partial(lark_of, can_open=can_open)
            return calls_lark(asked.text, partial(_enforced, can_open=can_open), of_form)
    raise ValueError(f"{asked.kind} is not known")


def _lark_of_grammar(text: str) -> str:
    gbnf = is_gbnf(text)
    if gbnf is None:
        raise GbnfError(
            "is neither Lark nor GBNF: give it a rule 'root ::= ...' for GBNF, or 'start: ...' for Lark"
        )
    return to_lark(text) if gbnf else text


def lark_of_schema(schema: dict[str, Any]) -> str:
    """The grammar of a schema that needs no rewriting."""
    return f"start: %json {json.dumps(schema | {'x-guidance': _JSON})}"


def _enforced(schema: dict[str, Any], can_open: CanOpen | None) -> dict[str, Any]:
    """Make a schema one that llguidance enforces, in place; raises ValueError if it cannot be enforced."""
    check_schema(schema)
    make_exact(schema, can_open)
    return schema | {"x-guidance": _JSON}  # the key is llguidance's own; what a row says there does not count


def complete(lark: str) -> str:
    """A checked grammar as it is compiled."""
    return lark + _OPTIONS
