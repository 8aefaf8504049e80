"""Benchmarks: who imports whom, that each script says what it is and runs, that what is written holds."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), ROOT / "cuda" / "README.md",
    *(ROOT / "benchmarks").glob("*.md"),
]  # fmt: skip


def imported_by(path: Path, word: str) -> Iterator[str]:
    """Modules and names that a file imports, with dots; nothing of one in which that word is not."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if word in text else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_imports_a_benchmark() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for name in imported_by(path, "benchmarks")
        if name.split(".")[0] == "benchmarks"
    ]
    assert found == []


def test_of_tests_a_benchmark_imports_the_support_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "benchmarks").rglob("*.py")
        for name in imported_by(path, "tests")
        if name.split(".")[0] == "tests" and not name.startswith("tests.support.")
    ]
    assert found == []


def test_the_support_imports_no_test() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "tests" / "support").rglob("*.py")
        for name in imported_by(path, "test_")
        if re.search(r"(^|\.)test_", name)
    ]
    assert found == []


HELP = """
import contextlib, io, json, runpy, sys
said = {}
for name in sys.argv[1:]:
    sys.argv, code = [name, "--help"], None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
    said[name] = [code, printed.getvalue()]
print(json.dumps(said))
"""


@pytest.mark.heavy
def test_each_script_says_how_it_is_run_and_can_be() -> None:
    """In one process: each would take a second to import what all import."""
    command = [sys.executable, "-c", HELP, *SCRIPTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for name in SCRIPTS:
        code, text = said[name]
        assert not code and f"python -m benchmarks.{name}" in text, f"{name}: {code}, {text}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_commands_and_modules_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"(?:python -m |`)((?:benchmarks|tools|tests)\.[a-z_0-9.]+[a-z0-9])", text):
        path = ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{name} is no module"
    for name in re.findall(r"`((?:tests|benchmarks|tools)/[\w/.]+\.(?:py|cu|csv|jsonl))`", text):
        assert (ROOT / name).is_file(), f"{name} is not a file"


@pytest.mark.heavy
def test_the_plot_and_its_tables_are_of_the_measured_points(tmp_path: Path) -> None:
    measured = sorted(str(path) for path in (ROOT / "benchmarks" / "measured").glob("*.jsonl"))
    options = ["-o", str(tmp_path / "plot.svg"), "--peers", "0.5b", "7b"]
    command = [sys.executable, "-m", "benchmarks.plot", *measured, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    pages = (ROOT / "benchmarks" / name for name in ("RESULTS.md", "history/speed.md"))
    written = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 20
    assert not [row for row in rows if row not in written]
    light, dark = (path.read_text() for path in sorted(tmp_path.glob("*.svg"), reverse=True))
    assert light != dark
    for said in ("Qwen2.5-0.5B, in 16 bits, on NVIDIA H200", "vLLM 0.24, output"):
        assert f">{said}<" in light and f">{said}<" in dark, said


def test_results_are_short_enough_to_be_read() -> None:
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").splitlines()
    assert len(written) <= 350
