"""Transactions that lost are run again, for a while; and everything that writes is among them."""

import ast
from pathlib import Path

import pytest

from nightmill import jobs
from nightmill.jobs.errors import DatabaseBusyError, DatabaseUnreachableError
from nightmill.jobs.sql.retrying import RETRY_SECONDS, retried


class Time:
    """In place of the module: a clock that sleeping moves."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr("nightmill.jobs.sql.retrying.time", made)
    return made


def test_what_lost_is_run_again_until_it_succeeds(time: Time) -> None:
    lost = [DatabaseBusyError(), DatabaseBusyError()]

    @retried
    def write(value: int) -> int:
        """Write."""
        if lost:
            raise lost.pop()
        return value

    assert write(7) == 7
    assert len(time.pauses) == 2
    assert (write.__name__, write.__doc__) == ("write", "Write.")


def test_what_loses_for_ever_is_an_error_in_the_end(time: Time) -> None:
    @retried
    def write() -> None:
        raise DatabaseBusyError("busy")

    with pytest.raises(DatabaseBusyError, match="busy"):
        write()
    assert RETRY_SECONDS <= time.seconds < RETRY_SECONDS + 1
    assert max(time.pauses) <= 0.5, "pauses must not grow without end"


def test_other_errors_are_not_tried_again(time: Time) -> None:
    @retried
    def write() -> None:
        raise DatabaseUnreachableError("away")

    with pytest.raises(DatabaseUnreachableError, match="away"):
        write()
    assert time.pauses == []


def _writes(function: ast.FunctionDef) -> bool:
    blocks = (node for node in ast.walk(function) if isinstance(node, ast.With))
    return any(
        ast.unparse(item.context_expr).endswith(".write()") for block in blocks for item in block.items
    )


def _writers() -> list[tuple[str, bool]]:
    """(module and function, is it retried?) of everything in `jobs` that opens a writing transaction."""
    found = []
    for path in sorted(Path(jobs.__file__).parent.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if ".write()" in text else ():
            if isinstance(node, ast.FunctionDef) and _writes(node):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                found.append((f"{path.name} {node.name}", "retried" in decorators))
    return found


def test_every_function_that_writes_is_retried() -> None:
    writers = _writers()
    assert len(writers) > 20
    assert [name for name, is_retried in writers if not is_retried] == []
