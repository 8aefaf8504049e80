"""llama.cpp's way with GBNF: rules as lists of elements, and a follower that keeps stacks of positions.

The oracle of `worker/grammar/gbnf`, with which it shares nothing. Written from llama.cpp's algorithm, in
which groups and repetitions become rules of their own, for grammars that are small.
"""

import re
from dataclasses import dataclass, field

_MOST_STACK = 400
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t]|\#[^\r\n]*)+) | (?P<line>[\r\n]+) | (?P<is>::=) | (?P<word>[A-Za-z0-9_-]+)
      | (?P<text>"(?:\\.|[^"\\])*") | (?P<set>\[(?:\\.|[^\]\\])*\]) | (?P<any>\.)
      | (?P<times>[*+?]|\{[^}]*\}) | (?P<mark>[|()])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|([^\\])", re.DOTALL)

Element = tuple[str, object]
"""("rule", name) or ("set", (positive, ranges))."""
Position = tuple[str, int, int]
"""A rule, one of its alternatives, and an element of that."""
Stack = tuple[Position, ...]


class Endless(Exception):
    """A stack grows without an end, as under left recursion."""


@dataclass
class Follower:
    """A grammar and the stacks of a text that follows it."""

    rules: dict[str, list[list[Element]]]
    stacks: set[Stack] = field(default_factory=set)

    def begin(self) -> "Follower":
        begins = [(("root", number, 0),) for number, one in enumerate(self.rules["root"]) if one]
        if not all(self.rules["root"]):
            begins.append(())
        return Follower(self.rules, self._advance(begins))

    def accept(self, character: str) -> "Follower":
        code = ord(character)
        moved = [
            self._behind(stack) for stack in self.stacks if stack and _matches(self._element(stack[-1]), code)
        ]
        return Follower(self.rules, self._advance(moved))

    def allows(self, character: str) -> bool:
        """Tell whether this may be next."""
        return any(stack and _matches(self._element(stack[-1]), ord(character)) for stack in self.stacks)

    @property
    def may_end(self) -> bool:
        return () in self.stacks

    def _element(self, position: Position) -> Element:
        rule, alternative, place = position
        return self.rules[rule][alternative][place]

    def _behind(self, stack: Stack) -> Stack:
        rule, alternative, place = stack[-1]
        more = place + 1 < len(self.rules[rule][alternative])
        return (*stack[:-1], (rule, alternative, place + 1)) if more else stack[:-1]

    def _advance(self, todo: list[Stack]) -> set[Stack]:
        """Stacks whose tops are sets of characters, or nothing."""
        seen, made = set[Stack](), set[Stack]()
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if len(stack) > _MOST_STACK:
                raise Endless
            if not stack or self._element(stack[-1])[0] == "set":
                made.add(stack)
                continue
            rest, name = self._behind(stack), str(self._element(stack[-1])[1])
            for number, alternative in enumerate(self.rules[name]):
                todo.append((*rest, (name, number, 0)) if alternative else rest)
        return made


def _matches(element: Element, code: int) -> bool:
    positive, ranges = element[1]  # type: ignore[misc]
    return bool(positive) == any(low <= code <= high for low, high in ranges)


def follower(text: str) -> Follower:
    """A grammar at the beginning of a text; raises ValueError and KeyError for what it cannot read."""
    return Follower(_Reader(text).rules).begin()


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if not found:
                raise ValueError(f"cannot be read at {place}")
            if found.lastgroup != "space":
                self.tokens.append((str(found.lastgroup), found[0]))
            place = found.end()
        self.rules: dict[str, list[list[Element]]] = {}
        self.at = 0
        self.lines()
        while self.at < len(self.tokens):
            kind, name = self.next()
            assert kind == "word" and self.next()[0] == "is"
            self.lines()
            self.rules[name] = self.alternatives(name, nested=False)
            if self.at < len(self.tokens) and self.tokens[self.at][0] != "line":
                raise ValueError(f"expecting newline, not {self.tokens[self.at]}")
            self.lines()
        for alternatives in self.rules.values():
            for alternative in alternatives:
                for kind, value in alternative:
                    if kind == "rule":
                        self.rules[str(value)]

    def next(self) -> tuple[str, str]:
        self.at += 1
        return self.tokens[self.at - 1]

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def lines(self) -> None:
        while self.peek()[0] == "line":
            self.at += 1

    def fresh(self, base: str) -> str:
        name = f"{base}_{len(self.rules)}"
        self.rules[name] = []
        return name

    def alternatives(self, rule: str, nested: bool) -> list[list[Element]]:
        made = [self.sequence(rule, nested)]
        while self.peek() == ("mark", "|"):
            self.at += 1
            self.lines()
            made.append(self.sequence(rule, nested))
        return made

    def sequence(self, rule: str, nested: bool) -> list[Element]:
        made: list[Element] = []
        last = 0  # where the item that may be repeated begins
        while True:
            if nested:
                self.lines()
            kind, said = self.peek()
            if kind in ("end", "line", "is") or (kind == "mark" and said != "("):
                return made
            self.at += 1
            if kind == "times":
                made = self.repeated(rule, made, last, said)
                continue
            last = len(made)
            if kind == "word":
                made.append(("rule", said))
            elif kind == "any":
                made.append(("set", (True, ((0, 0x10FFFF),))))
            elif kind == "set":
                made.append(("set", _ranges(said[1:-1])))
            elif kind == "text":
                made += [("set", (True, ((one, one),))) for one in _codes(said[1:-1])]
            else:
                self.lines()
                name = self.fresh(rule)
                self.rules[name] = self.alternatives(rule, nested=True)
                assert self.next() == ("mark", ")")
                made.append(("rule", name))

    def repeated(self, rule: str, made: list[Element], last: int, sign: str) -> list[Element]:
        if sign in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        else:
            first, comma, second = sign[1:-1].replace(" ", "").partition(",")
            least = int(first)
            most = (int(second) if second else None) if comma else least
        item = made[last:]
        behind: list[Element] = []
        if most is None:
            name = self.fresh(rule)
            self.rules[name] = [[*item, ("rule", name)], []]
            behind = [("rule", name)]
        else:
            for _ in range(most - least):  # S'(n) ::= S S'(n-1) |
                name = self.fresh(rule)
                self.rules[name] = [[*item, *behind], []]
                behind = [("rule", name)]
        return made[:last] + item * least + behind


def _codes(said: str) -> list[int]:
    made = []
    for *digits, escaped, plain in _ESCAPE.findall(said):
        written = next((one for one in digits if one), "")
        short = {"n": "\n", "t": "\t", "r": "\r"}.get(escaped, escaped or plain)
        made.append(int(written, 16) if written else ord(short))
    return made


def _ranges(said: str) -> tuple[bool, tuple[tuple[int, int], ...]]:
    positive = not said.startswith("^")
    parts = [found[0] for found in _ESCAPE.finditer(said if positive else said[1:])]
    made = []
    while parts:
        low = high = _codes(parts.pop(0))[0]
        if len(parts) > 1 and parts[0] == "-":
            high = _codes(parts[1])[0]
            del parts[:2]
        made.append((low, high))
    return positive, tuple(made)
