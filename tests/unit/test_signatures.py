"""A function takes few parameters, and a class has a name of its own."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_PARAMETERS = 8
MIRRORS_OPTIONS = {"worker/commands/run.py: run"}
"""Commands, to which click gives each option of the command line as a parameter."""


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool) -> int:
    """Parameters that a caller gives: without `self` and `cls`."""
    given = function.args
    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
    count += (given.vararg is not None) + (given.kwarg is not None)
    static = any(isinstance(name, ast.Name) and name.id == "staticmethod" for name in function.decorator_list)
    return count - (method and not static)


def functions(node: ast.AST, before: str = "") -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        name = before
        if isinstance(child, ast.expr):
            continue  # no definition is in an expression
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{before}{child.name}"
            yield name, parameters(child, method=isinstance(node, ast.ClassDef))
            name += "."
        elif isinstance(child, ast.ClassDef):
            name = f"{before}{child.name}."
        yield from functions(child, name)


def classes(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield child.name
        if not isinstance(child, ast.expr):
            yield from classes(child)


def test_no_function_has_too_many_parameters_and_no_two_classes_of_the_worker_one_name() -> None:
    """What belongs together is a frozen dataclass or a protocol. A record's fields are no parameters."""
    many, named = set(), defaultdict(list)
    for path, tree in modules("jobs", "worker"):
        many |= {f"{path}: {name}" for name, count in functions(tree) if count > MOST_PARAMETERS}
        for name in classes(tree) if path.startswith("worker") else ():
            if not name.startswith("_"):
                named[name].append(path)
    assert many == MIRRORS_OPTIONS
    assert len(named) > 300
    assert {name: paths for name, paths in named.items() if len(paths) > 1} == {}


def test_parameters_are_counted_as_a_caller_gives_them() -> None:
    text = "class A:\n    def f(self, a, /, b, *c, d, **e): ...\n    @staticmethod\n    def g(a, b): ...\n"
    assert dict(functions(ast.parse(text + "def h(a): ...\n"))) == {"A.f": 5, "A.g": 2, "h": 1}
