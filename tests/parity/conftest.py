"""Sums up what the comparison with transformers has found: a table in Markdown after the tests."""

from importlib.metadata import version

import pytest

WORST = "worst relative error"
"""The name under which a test records (case, how its prompt was computed, error, stage)."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    found: dict[str, dict[str, str]] = {}
    for report in reports:
        for name, value in report.user_properties:
            if name == WORST:
                case, way, error, stage = value
                found.setdefault(case, {})[way] = f"{error:.1e} ({stage})"
    if found:
        versions = f"transformers {version('transformers')} with PyTorch {version('torch')}"
        terminalreporter.section(f"largest relative error against {versions}")
        for line in table(found):
            terminalreporter.write_line(line)


def table(found: dict[str, dict[str, str]]) -> list[str]:
    """Lines: a model's errors, a column for each way in which its prompt was computed."""
    ways = list(dict.fromkeys(way for errors in found.values() for way in errors))
    lines = [f"| model | {' | '.join(ways)} |", "| --- " * (1 + len(ways)) + "|"]
    for case, errors in found.items():
        lines.append(f"| {case} | {' | '.join(errors.get(way, '-') for way in ways)} |")
    return lines
