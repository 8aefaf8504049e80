"""Reads GBNF as llama.cpp's parser does: from a text to rules, or to an error with its place and a remedy.

Refused, though llama.cpp takes it, is what means something else there than it seems to: a rule that is
defined twice (its last definition counts), `[]` (nothing), ranges that run backwards (no character), and
repetitions past 2,000 (any number).
"""

from typing import Final, NoReturn

from nightmill.worker.grammar.gbnf.tree import (
    ANY,
    Characters,
    Choice,
    Concatenation,
    GbnfError,
    Node,
    Reference,
    Repeat,
    Rule,
    Text,
    all_but,
    set_of,
)

MAX_BYTES: Final = 256 << 10
MAX_DEPTH: Final = 128
"""Deepest nesting of parentheses."""
MAX_RULES: Final = 4_000
MAX_TIMES: Final = 2_000
"""The highest number of a repetition, as in llama.cpp."""

_WORD: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_DIGITS: Final = frozenset("0123456789")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPES: Final = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_LENGTHS: Final = {"x": 2, "u": 4, "U": 8}
_TIMES: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse(text: str) -> dict[str, Rule]:
    """The rules by their names; raises GbnfError."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise GbnfError(f"has {size:,} bytes, more than {MAX_BYTES:,}; simplify it")
    return _Parser(text).rules()


def where(text: str, place: int) -> str:
    """Line and column of a place, as editors count them."""
    begin = text.rfind("\n", 0, place) + 1
    return f"line {text.count(chr(10), 0, place) + 1}, column {place - begin + 1}"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rule = ""
        self._depth = 0

    def rules(self) -> dict[str, Rule]:
        rules: dict[str, Rule] = {}
        self._skip(True)
        while self._at < len(self._text):
            rule = self._one_rule()
            if rule.name in rules:
                first = where(self._text, rules[rule.name].place)
                self._refuse(
                    "the rule is defined twice, first at " + first + ": join them with '|'", rule.place
                )
            rules[rule.name] = rule
            if len(rules) > MAX_RULES:
                self._refuse(f"there are more than {MAX_RULES:,} rules; simplify the grammar", rule.place)
            self._skip(True)
        return rules

    def _one_rule(self) -> Rule:
        place = self._at
        name = self._rule = self._word()
        if not name:
            self._refuse(
                f"a rule's name is expected, not {self._seen()}: a line's end ends a rule, unless it stands "
                "in parentheses or behind '|'"
            )
        self._skip(False)
        if not self._text.startswith("::=", self._at):
            self._refuse(f"'::=' is expected behind the rule's name, not {self._seen()}")
        self._at += 3
        self._skip(True)
        body = self._choice(nested=False)
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            self._refuse_rest()
        return Rule(name, body, place)

    def _refuse_rest(self) -> NoReturn:
        if self._text.startswith("::=", self._at):
            self._refuse("'::=' stands within a rule: each rule begins on a line of its own")
        if self._text[self._at] == ")":
            self._refuse("')' closes nothing; remove it")
        self._refuse(f"{self._seen()} is not part of GBNF; quote characters that are meant")

    def _choice(self, nested: bool) -> Node:
        items = [self._sequence(nested)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(True)
            items.append(self._sequence(nested))
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == '"':
                items.append(self._literal())
            elif character == "[":
                items.append(self._class())
            elif character == "(":
                items.append(self._group())
            elif character == ".":
                self._at += 1
                items.append(ANY)
            elif character in "<!":
                self._refuse(
                    "names tokens of the model, with which no answer is spelt; write the text that is meant"
                )
            elif character in _WORD:
                place = self._at
                items.append(Reference(self._word(), place))
            elif character in "*+?{":
                self._repeat(items, nested)
            else:
                break
            self._skip(nested)
        return items[0] if len(items) == 1 else Concatenation(tuple(items))

    def _group(self) -> Node:
        opened = self._at
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse(f"parentheses are nested more than {MAX_DEPTH} deep; name inner ones as rules")
        self._at += 1
        self._skip(True)
        body = self._choice(nested=True)
        if not self._text.startswith(")", self._at):
            if self._at < len(self._text):
                self._refuse_rest()
            self._refuse("'(' is not closed: add ')'", opened)
        self._at += 1
        self._depth -= 1
        return body

    def _repeat(self, items: list[Node], nested: bool) -> None:
        place = self._at
        sign = self._text[place]
        if not items:
            self._refuse(f"{sign!r} has nothing before it to repeat; quote it if the character is meant")
        self._at += 1
        least, most = self._times(place, nested) if sign == "{" else _TIMES[sign]
        items[-1] = Repeat(items[-1], least, most)

    def _times(self, place: int, nested: bool) -> tuple[int, int | None]:
        self._skip(nested)
        least = self._number()
        self._skip(nested)
        most: int | None = least
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(nested)
            digit = self._at < len(self._text) and self._text[self._at] in _DIGITS
            most = self._number() if digit else None
            self._skip(nested)
        if not self._text.startswith("}", self._at):
            self._refuse(f"'}}' or a number is expected in a repetition, not {self._seen()}")
        self._at += 1
        if most is not None and most < least:
            self._refuse(f"{{{least},{most}}} ends below its beginning; write {{{most},{least}}}", place)
        return least, most

    def _number(self) -> int:
        place = self._at
        while self._at < len(self._text) and self._text[self._at] in _DIGITS:
            self._at += 1
        digits = self._text[place : self._at]
        if not digits:
            self._refuse(f"a number is expected in a repetition, as in {{0,5}}, not {self._seen()}")
        if len(digits) > 9 or int(digits) > MAX_TIMES:
            self._refuse(
                f"repeats more than {MAX_TIMES:,} times; leave the upper number out for any number", place
            )
        return int(digits)

    def _literal(self) -> Node:
        opened = self._at
        self._at += 1
        made: list[str] = []
        while not self._text.startswith('"', self._at):
            if self._at >= len(self._text):
                self._refuse("the text is not closed: add '\"'", opened)
            place = self._at
            code = self._character()
            if not set_of([(code, code)]):
                self._refuse(f"U+{code:04X} is not a character of texts; leave it out", place)
            made.append(chr(code))
        self._at += 1
        return Text("".join(made))

    def _class(self) -> Node:
        opened = self._at
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                self._refuse("the class is not closed: add ']'", opened)
            place = self._at
            low = high = self._character()
            dash = self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at)
            if dash and self._at + 1 < len(self._text):
                self._at += 1
                high = self._character()
                if high < low:
                    self._refuse("the range runs backwards; write its lower end first", place)
            ranges.append((low, high))
        self._at += 1
        if not ranges:
            self._refuse("the class is empty; write \\] for a bracket, '.' for any character", opened)
        found = all_but(ranges) if negated else set_of(ranges)
        if not found:
            self._refuse("the class holds no character of texts; leave it out", opened)
        return Characters(found)

    def _character(self) -> int:
        """A code point, written as itself or as an escape."""
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return ord(character)
        place = self._at - 1
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind not in _LENGTHS:
            self._refuse(
                f"the escape \\{kind} is unknown; there are \\n, \\r, \\t, \\\\, \\\", \\[, \\], \\-, \\xXX, "
                "\\uXXXX and \\UXXXXXXXX",
                place,
            )  # fmt: skip
        digits = self._text[self._at : self._at + _LENGTHS[kind]]
        if len(digits) < _LENGTHS[kind] or not _HEX.issuperset(digits):
            self._refuse(f"\\{kind} needs {_LENGTHS[kind]} hexadecimal digits", place)
        self._at += len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF:
            self._refuse(f"\\{kind}{digits} is past U+10FFFF, the last code point", place)
        return code

    def _word(self) -> str:
        place = self._at
        while self._at < len(self._text) and self._text[self._at] in _WORD:
            self._at += 1
        return self._text[place : self._at]

    def _skip(self, newlines: bool) -> None:
        blanks = " \t\r\n" if newlines else " \t"
        text = self._text
        while self._at < len(text):
            if text[self._at] in blanks:
                self._at += 1
            elif text[self._at] == "#":
                while self._at < len(text) and text[self._at] not in "\r\n":
                    self._at += 1
            else:
                return

    def _seen(self) -> str:
        found = self._text[self._at : self._at + 1]
        return {"": "the end", "\n": "the line's end", "\r": "the line's end"}.get(found, repr(found))

    def _refuse(self, reason: str, place: int | None = None) -> NoReturn:
        at = where(self._text, self._at if place is None else place)
        rule = f", in the rule {self._rule[:80]!r}" if self._rule else ""
        raise GbnfError(f"{at}{rule}: {reason}")
