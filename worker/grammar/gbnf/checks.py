"""Checks between rules: each is defined, ends, and does not begin with itself."""

from collections.abc import Callable, Mapping

from nightmill.worker.grammar.gbnf.parser import where
from nightmill.worker.grammar.gbnf.tree import (
    Choice,
    Concatenation,
    GbnfError,
    Node,
    Reference,
    Repeat,
    Rule,
    Text,
    references,
)

Rules = Mapping[str, Rule]
_LONGEST_CYCLE = 6  # rules that a message names


def check(text: str, rules: Rules) -> None:
    """Raises GbnfError."""
    if "root" not in rules:
        raise GbnfError("has no rule named root, with which an answer begins; rename the first one")
    for rule in rules.values():
        for one in references(rule.body):
            if one.name not in rules:
                raise GbnfError(
                    f"{where(text, one.place)}, in the rule {rule.name[:80]!r}: the rule {one.name[:80]!r} "
                    "is not defined; define it, or quote it if the text is meant"
                )
    ending = least_fixpoint(rules, ends)
    for rule in rules.values():
        if rule.name not in ending:
            raise GbnfError(
                f"{where(text, rule.place)}: the rule {rule.name[:80]!r} never ends: it needs itself in each "
                "of its alternatives; add one without it"
            )
    _check_left_recursion(text, rules)


def least_fixpoint(rules: Rules, holds: Callable[[Node, set[str]], bool]) -> set[str]:
    """The names of the rules of which something holds, if it holds of nothing but for a reason."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for rule in rules.values():
        for one in {one.name for one in references(rule.body)}:
            users[one].append(rule.name)
    found = set[str]()
    left = list(rules)
    while left:
        name = left.pop()
        if name not in found and holds(rules[name].body, found):
            found.add(name)
            left += users[name]
    return found


def ends(node: Node, ending: set[str]) -> bool:
    """Tell whether a node has a text, given the rules that have one."""
    if isinstance(node, Reference):
        return node.name in ending
    if isinstance(node, Choice):
        return any(ends(item, ending) for item in node.items)
    if isinstance(node, Concatenation):
        return all(ends(item, ending) for item in node.items)
    return node.least == 0 or ends(node.item, ending) if isinstance(node, Repeat) else True


def nullable(node: Node, empty: set[str]) -> bool:
    """Tell whether a node may be the empty text, given the rules that may."""
    if isinstance(node, Reference):
        return node.name in empty
    if isinstance(node, Choice):
        return any(nullable(item, empty) for item in node.items)
    if isinstance(node, Concatenation):
        return all(nullable(item, empty) for item in node.items)
    if isinstance(node, Repeat):
        return node.least == 0 or nullable(node.item, empty)
    return isinstance(node, Text) and not node.text


def _check_left_recursion(text: str, rules: Rules) -> None:
    """Refuse rules that begin with themselves: a follower's stack would grow without an end.

    Where a rule comes back as the last thing, behind others that may be empty, it is recursion on the right.
    """
    empty = least_fixpoint(rules, nullable)
    growing: dict[str, list[str]] = {name: [] for name in rules}  # with something behind
    bare: dict[str, list[str]] = {name: [] for name in rules}  # with nothing before
    every: dict[str, list[str]] = {name: [] for name in rules}
    for rule in rules.values():
        for name, first, last in _left(rule.body, empty, True, True):
            every[rule.name].append(name)
            if not last:
                growing[rule.name].append(name)
            if first:
                bare[rule.name].append(name)
    component = {name: number for number, group in enumerate(components(every)) for name in group}
    for rule in rules.values():
        if any(component[name] == component[rule.name] for name in growing[rule.name]):
            _refuse(text, rules, [name for name in rules if component[name] == component[rule.name]])
    for group in components(bare):
        if len(group) > 1 or group[0] in bare[group[0]]:
            _refuse(text, rules, group)


def _refuse(text: str, rules: Rules, cycle: list[str]) -> None:
    first = min(cycle, key=lambda name: rules[name].place)
    through = [repr(name[:80]) for name in cycle if name != first][:_LONGEST_CYCLE]
    by = f", by way of {', '.join(through)}" if through else ""
    raise GbnfError(
        f"{where(text, rules[first].place)}: the rule {first[:80]!r} begins with itself{by} (left "
        'recursion); write it as a repetition, as in: item ("+" item)*'
    )


def _left(node: Node, empty: set[str], first: bool, last: bool) -> list[tuple[str, bool, bool]]:
    """The rules with which a node may begin, whether nothing precedes each, and whether nothing follows."""
    if isinstance(node, Reference):
        return [(node.name, first, last)]
    if isinstance(node, Choice):
        return [one for item in node.items for one in _left(item, empty, first, last)]
    if isinstance(node, Repeat):
        once = node.most is not None and node.most <= 1
        return [] if node.most == 0 else _left(node.item, empty, first, last and once)
    found: list[tuple[str, bool, bool]] = []
    items = node.items if isinstance(node, Concatenation) else ()
    for place, item in enumerate(items):
        found += _left(item, empty, first and place == 0, last and place == len(items) - 1)
        if not nullable(item, empty):
            break
    return found


def components(edges: Mapping[str, list[str]]) -> list[list[str]]:
    """Tarjan's strongly connected components, those that are pointed at first; without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack = set[str]()
    made: list[list[str]] = []
    for start in edges:
        if start in index:
            continue
        work = [(start, iter(edges[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            name, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(edges[other])))
                    break
                if other in on_stack:
                    low[name] = min(low[name], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    group = stack[stack.index(name) :] if stack[-1] != name else [name]
                    del stack[len(stack) - len(group) :]
                    on_stack.difference_update(group)
                    made.append(group)
    return made
