"""Writes a grammar of GBNF in Lark's syntax, as llguidance reads it: the same texts, to the character."""

from collections.abc import Mapping
from typing import Final

from nightmill.worker.grammar.gbnf.checks import check, least_fixpoint, nullable
from nightmill.worker.grammar.gbnf.lexemes import Lexemes, regular_rules
from nightmill.worker.grammar.gbnf.parser import parse
from nightmill.worker.grammar.gbnf.tree import (
    Characters,
    Choice,
    Concatenation,
    GbnfError,
    Node,
    Ranges,
    Reference,
    Repeat,
    Rule,
    Text,
    references,
)

_SOMETHING: Final = "/(?s:.+)/"


def to_lark(text: str) -> str:
    """The grammar for llguidance; raises GbnfError, which says what is wrong and where."""
    rules = parse(text)
    check(text, rules)
    return _Writer(rules).written()


class _Writer:
    """Names of rules become numbers: `r0` for those that are parsed, `R0` for those within terminals."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._empty = least_fixpoint(rules, nullable)
        self._filled = least_fixpoint(rules, _may_be_filled)
        self._lines: list[str] = []
        self._named: dict[str, str] = {}  # terminals by what they say
        self._written = set[str]()  # rules that terminals name

    def written(self) -> str:
        """The grammar."""
        root = self._rules["root"]
        if "root" not in self._filled:
            raise GbnfError("allows no answer but the empty one; say what is to be written")
        regular = regular_rules(self._rules)
        if "root" in regular:
            return "\n".join([f"start: {self._terminal(root.body)}", *self._lines])
        lexemes = Lexemes(self._rules, regular)
        parsed = [
            f"r{self._numbers[name]}: {self._parsed(body, lexemes)}"
            for name, body in lexemes.rules.items()
            if name in self._filled
        ]
        return "\n".join([f"start: r{self._numbers['root']}", *parsed, *self._lines])

    def _parsed(self, node: Node, lexemes: Lexemes) -> str:
        """Write a part that the parser follows; empty if that is the empty text alone."""
        if id(node) in lexemes.terminals:
            return self._terminal(node)
        if isinstance(node, Reference):
            return f"r{self._numbers[node.name]}" if node.name in self._filled else ""
        if isinstance(node, Repeat):
            return _repeated(self._parsed(node.item, lexemes), node)
        assert isinstance(node, Concatenation | Choice), "leaves are terminals"
        return _joined(node, [self._parsed(item, lexemes) for item in node.items])

    def _terminal(self, node: Node) -> str:
        """A terminal that matches a regular part; lexers want one that is not empty."""
        if not _may_be_filled(node, self._filled):
            return ""
        said = self._said(self._not_empty(node))
        if nullable(node, self._empty) and said is None:
            said = f"({self._said(node)}) & {_SOMETHING}"
        assert said is not None
        name = self._named.get(said)
        if name is None:
            name = self._named[said] = f"L{len(self._named)}"
            self._lines.append(f"{name}: {said}")
        return f"{name}?" if nullable(node, self._empty) else name

    def _not_empty(self, node: Node) -> Node | None:
        """A node without its empty text, if that is as simple as the node."""
        if not nullable(node, self._empty):
            return node
        if isinstance(node, Reference):
            return self._not_empty(self._rules[node.name].body)
        if isinstance(node, Repeat) and not nullable(node.item, self._empty):
            return Repeat(node.item, 1, node.most)
        return None

    def _said(self, node: Node | None) -> str | None:
        if node is None:
            return None
        for name in self._needed(node):
            body = self._rules[name].body
            self._lines.append(f"R{self._numbers[name]}: {self._expression(body) or '/(?:)/'}")
        return self._expression(node)

    def _needed(self, node: Node) -> list[str]:
        """The rules of a terminal that are not written yet."""
        found: list[str] = []
        left = [one.name for one in references(node)]
        while left:
            name = left.pop()
            if name not in self._written and name in self._filled:
                self._written.add(name)
                found.append(name)
                left += [one.name for one in references(self._rules[name].body)]
        return found

    def _expression(self, node: Node) -> str:
        """A part of a terminal; empty if it is the empty text alone."""
        if isinstance(node, Characters):
            return f"/[{_class(node.ranges)}]/"
        if isinstance(node, Text):
            return f"/{''.join(map(_escaped, map(ord, node.text)))}/" if node.text else ""
        if isinstance(node, Reference):
            return f"R{self._numbers[node.name]}" if node.name in self._filled else ""
        if isinstance(node, Repeat):
            return _repeated(self._expression(node.item), node)
        return _joined(node, [self._expression(item) for item in node.items])


def _joined(node: Concatenation | Choice, items: list[str]) -> str:
    filled = [item for item in items if item]
    if not filled:
        return ""
    if isinstance(node, Concatenation):
        return filled[0] if len(filled) == 1 else f"({' '.join(filled)})"
    filled = list(dict.fromkeys(filled))
    chosen = filled[0] if len(filled) == 1 else f"({' | '.join(filled)})"
    return f"({chosen})?" if "" in items else chosen


def _repeated(item: str, node: Repeat) -> str:
    if not item or node.most == 0:
        return ""
    sign = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((node.least, node.most))
    if sign is None:
        sign = f"{{{node.least},{'' if node.most is None else node.most}}}"
    return f"({item}){sign}"


def _class(ranges: Ranges) -> str:
    return "".join(
        _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges
    )


def _escaped(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:x}}}"


def _may_be_filled(node: Node, filled: set[str]) -> bool:
    """Tell whether a node has a text that is not empty, given the rules that have one."""
    if isinstance(node, Reference):
        return node.name in filled
    if isinstance(node, Concatenation | Choice):
        return any(_may_be_filled(item, filled) for item in node.items)
    if isinstance(node, Repeat):
        return node.most != 0 and _may_be_filled(node.item, filled)
    return isinstance(node, Characters) or bool(node.text)
