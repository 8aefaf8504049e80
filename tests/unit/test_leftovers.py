"""A test session ends what it has started, also when it is killed; what is left for its end fails it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support import leftovers
from tests.support.servers import wait_until

pytestmark = pytest.mark.heavy

CONFTEST = "from tests.conftest import *  # the hooks of all sessions\n"
DAEMONS = """
import os, pathlib, subprocess

def start(folder, **more):
    command = ["sh", "-c", "cd $0 && exec setsid sleep 300 >/dev/null 2>&1 & echo $!", str(folder)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, **more).stdout)

def test_daemons(tmp_path):
    marked = start("/", env=dict(os.environ))
    unmarked = start(tmp_path, env={"PATH": os.environ["PATH"]})
    pathlib.Path(os.environ["PIDS"]).write_text(f"{marked} {unmarked}")
    END
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """The command of a session of one test that starts two daemons, its environment, where their ids go."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    pids = tmp_path / "pids"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(tmp_path), str(tmp_path / "test_daemons.py")]
    environment = {**os.environ, "PIDS": str(pids), "PYTHONPATH": str(Path.cwd())}
    environment["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)
    environment.pop(leftovers.MARK, None)
    yield command, environment, pids
    with suppress(FileNotFoundError):
        for pid in map(int, pids.read_text().split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _gone(pids: Path) -> bool:
    return not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())


def test_a_session_that_leaves_daemons_behind_fails_names_them_and_ends_them(
    session: tuple[list[str], dict[str, str], Path], tmp_path: Path
) -> None:
    command, environment, pids = session
    (tmp_path / "test_daemons.py").write_text(DAEMONS.replace("END", "pass"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    for pid in pids.read_text().split():
        assert f"process {pid}, sleep 300, in " in done.stdout
    assert "started by test_daemons.py::test_daemons (call)" in done.stdout
    assert _gone(pids)


def test_the_daemons_of_a_killed_session_end_with_it(
    session: tuple[list[str], dict[str, str], Path], tmp_path: Path
) -> None:
    command, environment, pids = session
    (tmp_path / "test_daemons.py").write_text(DAEMONS.replace("END", "import time; time.sleep(300)"))
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: pids.exists() and pids.read_text().count(" ") == 1, 60, "the start of two daemons")
        assert not _gone(pids)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: _gone(pids), 30, "the end of the daemons")


def test_a_session_that_leaves_nothing_behind_passes(
    session: tuple[list[str], dict[str, str], Path], tmp_path: Path
) -> None:
    command, environment, _ = session
    (tmp_path / "test_daemons.py").write_text("def test_nothing() -> None: ...\n")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "left behind" not in done.stdout
