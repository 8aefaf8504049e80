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
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{before}{child.name}"
            yield name, parameters(child, method=isinstance(node, ast.ClassDef))
            name += "."
        elif isinstance(child, ast.ClassDef):
            name = f"{before}{child.name}."
        yield from functions(child, name)


def test_no_function_has_more_than_eight_parameters() -> None:
    """What belongs together is a frozen dataclass or a protocol. A record's fields are no parameters."""
    many = {
        f"{path}: {name}"
        for path, tree in modules("jobs", "worker")
        for name, count in functions(tree)
        if count > MOST_PARAMETERS
    }
    assert many == MIRRORS_OPTIONS


def test_parameters_are_counted_as_a_caller_gives_them() -> None:
    text = "class A:\n    def f(self, a, /, b, *c, d, **e): ...\n    @staticmethod\n    def g(a, b): ...\n"
    assert dict(functions(ast.parse(text + "def h(a): ...\n"))) == {"A.f": 5, "A.g": 2, "h": 1}


def test_no_two_classes_of_the_worker_have_one_name() -> None:
    found = defaultdict(list)
    for path, tree in modules("worker"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
