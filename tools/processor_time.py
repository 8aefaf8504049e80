"""A plugin for pytest that says which tests and modules take the most processor time.

    python -m pytest -p tools.processor_time tests/unit/jobs

pytest's own `--durations` are those of a clock: on a machine that has others to serve they say more about
these. Counted is what the test's process has used, and all processes that it has started and waited for; not
one that is left to others to wait for, as a worker's engine is once the worker was killed.
"""

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

LONGEST = 40
_SPENT = "processor seconds"


def _spent() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note what the phase has taken: it travels with the test's report, from whichever process."""
    before = _spent()
    try:
        return (yield)
    finally:
        item.user_properties.append((_SPENT, _spent() - before))


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List tests, then modules, each with its seconds."""
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                tests[report.nodeid] = sum(value for name, value in report.user_properties if name == _SPENT)
    modules: Counter[str] = Counter()
    for name, seconds in tests.items():
        modules[name.partition("::")[0]] += seconds
    terminalreporter.section(f"processor time: {sum(tests.values()):.0f} s in {len(tests)} tests")
    for counted in (tests, modules):
        for name, seconds in counted.most_common(LONGEST):
            terminalreporter.write_line(f"{seconds:8.2f} s  {name}")
        terminalreporter.write_line("")
