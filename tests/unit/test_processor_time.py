"""`tools.processor_time` counts what tests and their children use, whichever process they run in."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import processor_time

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[2]
BURN = "import time\nwhile time.process_time() < {}: pass"
TESTS = f"""
import subprocess, sys, time

def test_sleeps():
    time.sleep(0.5)

def test_has_a_child_that_works():
    subprocess.run([sys.executable, "-c", {BURN.format(0.3)!r}], check=True)
"""


def test_who_works_is_listed_before_who_waits(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", processor_time.__name__, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    assert re.search(r"processor time: \d+ s in 2 tests", done.stdout), done.stdout
    listed = re.findall(r"^ +([\d.]+) s  \S+::(\S+)$", done.stdout, re.MULTILINE)
    seconds = {name: float(spent) for spent, name in listed}
    assert seconds["test_has_a_child_that_works"] > 0.25 > seconds["test_sleeps"]
