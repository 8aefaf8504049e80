"""Chooses the parts of a grammar that become lexemes, so that a greedy lexer loses no text.

llguidance matches lexemes by an automaton, and between them it parses. Its lexer is greedy: it ends a lexeme
only where no lexeme that is allowed can go on. GBNF knows no lexemes; where a rule could end and could go on
as well, both must stay open. So large regular parts become lexemes, for speed, and each that another (or
itself) could run on with, by a character that may follow, is taken apart, at worst into single characters,
among which nothing is greedy.
"""

from collections.abc import Mapping
from typing import Final

from nightmill.worker.grammar.gbnf.automaton import Atoms, Automaton, Builder, TooLargeError, conflict
from nightmill.worker.grammar.gbnf.checks import least_fixpoint
from nightmill.worker.grammar.gbnf.tree import (
    Characters,
    Choice,
    Concatenation,
    Node,
    Reference,
    Repeat,
    Rule,
    Text,
    references,
)

MOST_ROUNDS: Final = 100
MOST_LEXEMES: Final = 600
"""That are compared with each other; a grammar of more is followed by single characters."""
_MOST_POSITIONS: Final = 30_000  # of all automata of a round


class _ApartError(Exception):
    """There are too many lexemes to compare them."""


class Lexemes:
    """A grammar whose regular parts are nodes that are written as terminals.

    `rules` are those that the parser follows. Of their nodes, those in `terminals` (by identity) are lexemes.
    """

    def __init__(self, rules: Mapping[str, Rule], regular: frozenset[str]) -> None:
        self._source = rules
        self._regular = regular
        self._spelling = _Spelling()
        self._split = set[str]()
        self._known: dict[int, bool] = {}
        self._single = False
        self.rules: dict[str, Node] = {}
        self.terminals: dict[int, Node] = {}
        self._keep: list[Node] = []
        self._atoms = Atoms(rule.body for rule in rules.values())
        self._builder = Builder(rules, self._atoms)
        self._automata: dict[str, Automaton] = {}
        self._choose()

    def _choose(self) -> None:
        try:
            for _ in range(MOST_ROUNDS):
                self._plan()
                found = self._conflicts()
                if not found:
                    return
                self._split |= found
        except _ApartError:
            pass
        self._single = True
        self._plan()

    def _plan(self) -> None:
        """Lay the grammar out anew: which rules the parser follows, and where lexemes stand in them."""
        self.rules, self.terminals, self._keep = {}, {}, []
        left = ["root"]
        while left:
            name = left.pop()
            if name not in self.rules:
                self.rules[name] = self._laid(self._source[name].body)
                left += {one.name for one in self._open_references(self.rules[name])}

    def _open_references(self, node: Node) -> list[Reference]:
        found, left = [], [node]
        while left:
            one = left.pop()
            if id(one) in self.terminals:
                continue
            if isinstance(one, Reference):
                found.append(one)
            elif isinstance(one, Concatenation | Choice):
                left += one.items
            elif isinstance(one, Repeat):
                left.append(one.item)
        return found

    def _laid(self, node: Node) -> Node:
        if self._is_regular(node) and self._is_whole(node):
            return self._terminal(node)
        if isinstance(node, Concatenation | Choice):
            return self._laid_group(node)
        if isinstance(node, Repeat):
            return Repeat(self._laid(node.item), node.least, node.most)
        if isinstance(node, Text):
            characters = tuple(Text(one) for one in node.text)
            return Concatenation(tuple(self._terminal(one) for one in characters))
        return node

    def _laid_group(self, node: Concatenation | Choice) -> Node:
        """Neighbours that are regular are one lexeme, unless that is one that is to be taken apart."""
        kind = type(node)
        made: list[Node] = []
        run: list[Node] = []
        for item in (*node.items, None):
            if item is not None and self._is_regular(item):
                run.append(item)
                continue
            together = kind(tuple(run))
            if 1 < len(run) < len(node.items) and self._is_whole(together):
                made.append(self._terminal(together))
            else:
                made += [self._laid(one) for one in run]
            run = []
            if item is not None:
                made.append(self._laid(item))
        return kind(tuple(made))

    def _is_regular(self, node: Node) -> bool:
        found = self._known.get(id(node))
        if found is None:  # a node of the grammar's own, which lives as long as the rules do
            found = self._known[id(node)] = all(one.name in self._regular for one in references(node))
        return found

    def _is_whole(self, node: Node) -> bool:
        """Tell whether a regular part stays one lexeme."""
        if isinstance(node, Characters) or (isinstance(node, Text) and len(node.text) <= 1):
            return True
        spelt = self._spelling.of(node)
        if self._single or spelt in self._split:
            return False
        try:
            self._automaton(spelt, node)
        except TooLargeError:
            self._split.add(spelt)
            return False
        return True

    def _terminal(self, node: Node) -> Node:
        self._keep.append(node)
        self.terminals[id(node)] = node
        return node

    def _automaton(self, spelt: str, node: Node) -> Automaton:
        if spelt not in self._automata:
            self._automata[spelt] = self._builder.build(node)
        return self._automata[spelt]

    def _conflicts(self) -> set[str]:
        """The lexemes that could run on where another one, or a text of their own, ends."""
        spelt = {self._spelling.of(node): node for node in self.terminals.values()}
        if len(spelt) > MOST_LEXEMES:
            raise _ApartError
        automata = {name: self._automaton(name, node) for name, node in spelt.items()}
        if sum(len(one.masks) for one in automata.values()) > _MOST_POSITIONS:
            raise _ApartError
        follow = _Follow(self.rules, self.terminals, self._spelling, automata).found
        # A lexer reads bytes: it has gone on before it sees which character that begins with one is meant.
        follow = {name: self._atoms.alike(mask) for name, mask in follow.items()}
        begins = {name: one.begins for name, one in automata.items()}
        goes_on = {name: one.goes_on for name, one in automata.items()}
        found = set[str]()
        for two, automaton in automata.items():
            if not goes_on[two]:
                continue
            for one, other in automata.items():
                after = follow.get(one, 0)
                if begins[one] & begins[two] and after & goes_on[two] and conflict(other, automaton, after):
                    found.add(two)
                    break
        return found


class _Follow:
    """The characters that may stand behind each lexeme."""

    def __init__(
        self,
        rules: Mapping[str, Node],
        terminals: Mapping[int, Node],
        spelling: "_Spelling",
        automata: Mapping[str, Automaton],
    ) -> None:
        self.found: dict[str, int] = {}
        self._terminals, self._spelling, self._automata = terminals, spelling, automata
        self._rules = rules
        self._begins: dict[str, tuple[int, bool]] = dict.fromkeys(rules, (0, False))
        self._settle_beginnings()
        self._behind: dict[str, int] = dict.fromkeys(rules, 0)
        self._left = list(rules)
        while self._left:
            name = self._left.pop()
            self._walk(rules[name], self._behind[name])

    def _settle_beginnings(self) -> None:
        users: dict[str, set[str]] = {name: set() for name in self._rules}
        for name, body in self._rules.items():
            for one in references(body):
                if one.name in users:
                    users[one.name].add(name)
        left = list(self._rules)
        while left:
            name = left.pop()
            now = self._beginning(self._rules[name])
            if now != self._begins[name]:
                self._begins[name] = now
                left += users[name]

    def _beginning(self, node: Node) -> tuple[int, bool]:
        """The characters with which a node begins, and whether it may be empty."""
        if id(node) in self._terminals:
            automaton = self._automata[self._spelling.of(node)]
            return automaton.begins, automaton.nullable
        if isinstance(node, Reference):
            return self._begins[node.name]
        if isinstance(node, Repeat):
            begins, empty = self._beginning(node.item)
            return (0, True) if node.most == 0 else (begins, empty or node.least == 0)
        made, all_empty, any_empty = 0, True, False
        for item in node.items if isinstance(node, Concatenation | Choice) else ():
            begins, empty = self._beginning(item)
            if isinstance(node, Choice) or all_empty:
                made |= begins
            all_empty, any_empty = all_empty and empty, any_empty or empty
        return made, any_empty if isinstance(node, Choice) else all_empty

    def _walk(self, node: Node, behind: int) -> None:
        if id(node) in self._terminals:
            spelt = self._spelling.of(node)
            self.found[spelt] = self.found.get(spelt, 0) | behind
        elif isinstance(node, Reference):
            if behind & ~self._behind[node.name]:
                self._behind[node.name] |= behind
                self._left.append(node.name)
        elif isinstance(node, Choice):
            for item in node.items:
                self._walk(item, behind)
        elif isinstance(node, Repeat):
            if node.most != 0:
                again = self._beginning(node.item)[0] if node.most != 1 else 0
                self._walk(node.item, behind | again)
        elif isinstance(node, Concatenation):
            for item in reversed(node.items):
                self._walk(item, behind)
                begins, empty = self._beginning(item)
                behind = begins | (behind if empty else 0)


class _Spelling:
    """A name for each regular part by what it says: equal parts are one lexeme."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._numbers: dict[object, str] = {}
        self._keep: list[Node] = []

    def of(self, node: Node) -> str:
        """The name."""
        found = self._known.get(id(node))
        if found is None:
            self._keep.append(node)
            found = self._known[id(node)] = self._numbers.setdefault(
                self._shape(node), str(len(self._numbers))
            )
        return found

    def _shape(self, node: Node) -> object:
        if isinstance(node, Characters):
            return ("c", node.ranges)
        if isinstance(node, Text):
            return ("t", node.text)
        if isinstance(node, Reference):
            return ("r", node.name)
        if isinstance(node, Repeat):
            return ("*", self.of(node.item), node.least, node.most)
        return (type(node).__name__, tuple(self.of(item) for item in node.items))


def regular_rules(rules: Mapping[str, Rule]) -> frozenset[str]:
    """The rules that come back to themselves by no way, nor name one that does."""
    return frozenset(
        least_fixpoint(rules, lambda node, found: all(one.name in found for one in references(node)))
    )
