"""Draws the product: packages as rooms, imports as arrows, and the figures by which its shape is judged.

    python -m tools.look [--root FOLDER]      # `make look`; FOLDER: another checkout, as of an earlier commit

Reads files with `ast` and imports nothing. For each of PACKAGES, a room is a package or a module at its top,
and an arrow is an import of one room's modules from another's, wherever in the code it stands. Floors follow
from the arrows: a room stands above all that it imports. Rooms that import each other in a circle share a
floor; those of their arrows that break the circle point up. Prints at most 110 columns; takes six seconds.
"""

import argparse
import ast
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

PACKAGES = ("jobs", "worker", "worker/runners/gpu")
PRODUCT = ("jobs", "worker", "cuda", "migrations", "src")
CODE = {".py", ".cu", ".cuh", ".html", ".js", ".css", ".j2"}
FRAGMENTS = ("What", "Whether", "Of", "Those", "How", "As", "Where")
COLUMNS = 110
ROOT = Path(__file__).parents[1]

Arrows = Mapping[str, Mapping[str, int]]  # room -> imported room -> number of imports


@dataclass(frozen=True)
class Module:
    """A Python file of the product: its dotted name below the root, its lines and its syntax tree."""

    name: str
    package: bool
    lines: int
    tree: ast.Module

    @cached_property
    def imported(self) -> tuple[str, ...]:
        """Dotted names that the module imports, without `nightmill.`: modules, or names in modules."""
        found = []
        for node in _statements(self.tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = self.name.split(".")
                    parts = parts[: len(parts) - node.level + self.package]
                    base = ".".join([*parts, *([base] if base else [])])
                found += [f"{base}.{alias.name}" for alias in node.names]
        return tuple(name.removeprefix("nightmill.") for name in found)


@dataclass(frozen=True)
class Drawing:
    """The rooms of one package, the arrows between them, and the floors that follow."""

    modules: Mapping[str, Sequence[Module]]  # by room
    arrows: Arrows

    @cached_property
    def circles(self) -> list[list[str]]:
        """Rooms that import each other, directly or by way of others."""
        reached = {room: _reached(room, self.arrows) for room in self.modules}
        circles = {
            frozenset(other for other in reached[room] if room in reached[other])
            for room in self.modules
            if room in reached[room]
        }
        return sorted(map(sorted, circles))

    @cached_property
    def floors(self) -> list[list[str]]:
        """Rooms from the top floor to the ground."""
        circle_of = {room: tuple(circle) for circle in self.circles for room in circle}
        heights: dict[tuple[str, ...], int] = {}

        def height(group: tuple[str, ...]) -> int:
            if group not in heights:
                below = {circle_of.get(to, (to,)) for room in group for to in self.arrows.get(room, ())} - {
                    group
                }
                heights[group] = 1 + max(map(height, below), default=-1)
            return heights[group]

        floors: dict[int, list[str]] = defaultdict(list)
        for room in self.modules:
            floors[height(circle_of.get(room, (room,)))].append(room)
        return [sorted(floors[level]) for level in sorted(floors, reverse=True)]

    @cached_property
    def upward(self) -> list[tuple[str, str]]:
        """Arrows of circles that point up, if who imports most and is imported least stands first."""
        return [
            (room, to)
            for circle in self.circles
            for order in [_ordered(circle, self.arrows)]
            for room in order
            for to in self.arrows.get(room, ())
            if to in order and order.index(to) < order.index(room)
        ]

    def text(self) -> Iterator[str]:
        """Floors from the top, a line or more for each room: its size and what it imports."""
        width = max(map(len, self.modules))
        for floor in self.floors:
            yield "-" * COLUMNS
            for room in floor:
                modules = self.modules[room]
                size = f"{len(modules):>3} {sum(module.lines for module in modules):>6,}"
                targets = [f"{to} {count}" for to, count in sorted(self.arrows.get(room, {}).items())]
                begin = f"{room:<{width}} {size}  "
                yield from wrap(
                    begin + ("-> " + ", ".join(targets) if targets else ""),
                    COLUMNS,
                    subsequent_indent=" " * (len(begin) + 3),
                    break_on_hyphens=False,
                    drop_whitespace=True,
                )
        yield "-" * COLUMNS
        for circle in self.circles:
            yield from wrap(f"circle: {', '.join(circle)}", COLUMNS, subsequent_indent="        ")
        for room, to in self.upward:
            yield f"up: {room} -> {to}"
        count = sum(map(len, self.arrows.values()))
        yield (
            f"{len(self.modules)} rooms, {len(self.floors)} floors, {count} arrows, "
            f"{len(self.upward)} up, {len(self.circles)} circles"
        )


def read(root: Path) -> list[Module]:
    """All Python modules of the product below a checkout's root."""
    collects = gc.isenabled()
    gc.disable()  # no node is garbage, and collections would take longer than parsing
    try:
        return list(_modules(root))
    finally:
        if collects:
            gc.enable()


def _modules(root: Path) -> Iterator[Module]:
    for top in ("jobs", "worker"):
        for path in sorted((root / top).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            parts = path.relative_to(root).with_suffix("").parts
            package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if package else parts)
            yield Module(name, package, text.count("\n"), ast.parse(text, str(path)))


def draw(modules: Sequence[Module], package: str) -> Drawing:
    """The rooms of a package (a path) and their arrows; its own `__init__` is the room `__init__`."""
    prefix = package.replace("/", ".")
    names = {module.name for module in modules}

    def room_of(name: str) -> str | None:
        if name == prefix:
            return "__init__"
        return name[len(prefix) + 1 :].split(".")[0] if name.startswith(prefix + ".") else None

    def module_of(name: str) -> str:
        while name not in names and "." in name:
            name = name.rpartition(".")[0]
        return name

    rooms: dict[str, list[Module]] = defaultdict(list)
    arrows: dict[str, Counter[str]] = defaultdict(Counter)
    for module in modules:
        if (room := room_of(module.name)) is None:
            continue
        rooms[room].append(module)
        for to in {module_of(name) for name in module.imported}:
            if (target := room_of(to)) not in (None, room):
                arrows[room][str(target)] += 1
    return Drawing(rooms, arrows)


def figures(root: Path, modules: Sequence[Module]) -> Iterator[str]:
    """What is counted over the whole product, a line each."""
    lines = {
        top: sum(path.read_bytes().count(b"\n") for path in (root / top).rglob("*") if _is_code(path))
        for top in PRODUCT
    }
    by_folder = ", ".join(f"{top} {count:,}" for top, count in lines.items())
    yield f"modules {len(modules)}; lines of product {sum(lines.values()):,} ({by_folder})"
    past = [module.name for module in modules if module.lines > 400]
    yield f"modules of more than 400 lines: {len(past)}{': ' if past else ''}{', '.join(past)}"

    loose = sorted(path.stem for path in (root / "jobs").glob("*.py") if path.stem != "__init__")
    yield f"modules at the top of jobs/, without __init__: {len(loose)}: {', '.join(loose)}"

    files = Counter(module.name.rpartition(".")[2] for module in modules if not module.package)
    yield _repeated("file names that occur twice or more", files)
    classes = Counter(
        node.name
        for module in modules
        for node in _statements(module.tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    yield _repeated("public class names that occur twice or more", classes)

    counted = sorted(_parameters(modules), key=lambda found: (-found[0], found[1]))
    most = [f"{name} {count}" for count, name in counted if count > 8]
    yield f"functions of more than 8 parameters: {len(most)}; most first: {', '.join(most[:12])}"

    texts = [text for module in modules for text in _docstrings(module.tree)]
    yield _fragments("docstrings of modules, classes and functions", texts)
    yield _fragments(
        "docstrings of attributes", [text for each in modules for text in _attributes(each.tree)]
    )


def main() -> None:
    """Print a drawing for each of PACKAGES, then the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    root = parser.parse_args().root
    modules = read(root)
    for package in PACKAGES:
        print(f"{package}/: room, modules, lines -> what it imports, with the number of modules that do")
        print(*draw(modules, package).text(), sep="\n", end="\n\n")
    for line in figures(root, modules):
        print(*wrap(line, COLUMNS, subsequent_indent="    ", break_on_hyphens=False), sep="\n")


def _reached(start: str, arrows: Arrows) -> set[str]:
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        new = set(arrows.get(ahead.pop(), ())) - reached
        reached |= new
        ahead += new
    return reached


def _ordered(circle: Sequence[str], arrows: Arrows) -> list[str]:
    """The rooms in an order with few arrows backwards, as Eades, Lin and Smyth find one."""
    left, front, back = set(circle), [], []

    def out(room: str) -> int:
        return sum(count for to, count in arrows.get(room, {}).items() if to in left)

    def into(room: str) -> int:
        return sum(arrows.get(other, {}).get(room, 0) for other in left)

    while left:
        if sinks := sorted(room for room in left if not out(room)):
            back.append(sinks[0])
            left.remove(sinks[0])
            continue
        best = min(left, key=lambda room: (into(room) > 0, into(room) - out(room), room))
        front.append(best)
        left.remove(best)
    return front + back[::-1]


def _is_code(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.suffix in CODE


def _repeated(what: str, counts: Counter[str]) -> str:
    twice = sorted(
        (name for name, count in counts.items() if count > 1), key=lambda name: (-counts[name], name)
    )
    return f"{what}: {len(twice)}: {', '.join(f'{name} {counts[name]}' for name in twice)}"


def _parameters(modules: Sequence[Module]) -> Iterator[tuple[int, str]]:
    for module in modules:
        for node in _statements(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len([name for name in named if name not in ("self", "cls")])
                yield count + bool(given.vararg) + bool(given.kwarg), f"{module.name}.{node.name}"


def _fragments(what: str, texts: Sequence[str]) -> str:
    begins = Counter(text.split()[0].rstrip(",:;.") for text in texts if text.split())
    by_word = ", ".join(f"{word} {begins[word]}" for word in FRAGMENTS)
    count = sum(begins[word] for word in FRAGMENTS)
    return f"{what}: {len(texts):,}; that begin as fragments do: {count} ({by_word})"


def _statements(tree: ast.Module) -> list[ast.AST]:
    """The nodes of a tree, as of `ast.walk`, but for expressions, which are most of it."""
    found: list[ast.AST] = [tree]
    for node in found:
        found += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return found


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield text


def _attributes(tree: ast.Module) -> Iterator[str]:
    """Strings that stand behind an assignment in a module or a class."""
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement, after in pairwise(node.body):
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))) if isinstance(
                        statement, ast.Assign | ast.AnnAssign
                    ):
                        yield text


if __name__ == "__main__":
    main()
