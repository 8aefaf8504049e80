"""0 is a value: whoever asks whether an optional number is there compares it with None.

Celery says "end, with exit code 0" by setting a field to 0; `0 == False`, and a worker that took it for "not
set" went on. So nothing in this package that may be a number or None is asked for its truth.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from nightmill import package_directory

_NUMBERS = {"int", "float", "timedelta", "Moment"}
_ASKED_OFTEN = {"should_stop", "should_terminate", "flag"}


def _is_optional_number(annotation: ast.expr | None) -> bool:
    if not isinstance(annotation, ast.BinOp | ast.Constant):  # an alternative, or a text that has one
        return False
    parts = set(ast.unparse(annotation).strip("\"'").split(" | "))
    return "None" in parts and len(parts) > 1 and parts - {"None"} <= _NUMBERS


def _optional_numbers(tree: ast.AST) -> set[str]:
    """Names, of parameters, variables, fields and properties, that may be a number or None."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=annotation) if _is_optional_number(annotation):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=annotation):
                if _is_optional_number(annotation):
                    found.add(name)
            case ast.FunctionDef(name=name, returns=annotation) if _is_optional_number(annotation):
                found.add(name)
    return found


def _asked(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that are asked for their truth."""
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                yield test
            case ast.BoolOp(values=values):
                yield from values[:-1]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield operand
            case ast.comprehension(ifs=ifs):
                yield from ifs
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[ast.Tuple(elts=of)]):
                if any(isinstance(one, ast.Constant) and one.value is False for one in of):
                    yield left  # 0 is in (None, False)


def _faults(path: Path) -> list[str]:
    text = path.read_text()
    if not any(word in text for word in ("None", *_ASKED_OFTEN)):
        return []
    tree = ast.parse(text)
    optional = _optional_numbers(tree) | _ASKED_OFTEN
    found = []
    for one in _asked(tree):
        asked = one.func if isinstance(one, ast.Call) else one
        name = asked.attr if isinstance(asked, ast.Attribute) else getattr(asked, "id", None)
        if name in optional:
            found.append(f"{path}:{one.lineno}: {ast.unparse(one)}")
    return found


def test_an_optional_number_is_compared_with_none() -> None:
    sources = [
        path for part in ("jobs", "worker") for path in sorted((package_directory() / part).rglob("*.py"))
    ]
    assert len(sources) > 500
    assert [fault for path in sources for fault in _faults(path)] == []


def test_the_kind_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "def f(a: int | None, b: str):\n    if a and b:\n        return a or 1\n    return not b\n"
    )
    assert [fault.partition(": ")[2] for fault in _faults(path)] == ["a", "a"]
    path.write_text("def f(flag):\n    return flag not in (None, False)\n")
    assert len(_faults(path)) == 1
