"""What `pip install` gets: everything that is read at run time, and nothing that hides another package."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.settings import Settings
from tests.support.servers import clean_environment, worker_env

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("nightmill-*.whl")
    return built


def test_a_wheel_adds_one_import_name_with_all_that_is_read_at_run_time(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    links = [path for path in (ROOT / "src" / "nightmill").iterdir() if path.is_symlink()]
    folders = {link.readlink().name: link.name for link in links}
    assert len(folders) == 5
    for path in tracked.splitlines():
        folder, _, rest = path.partition("/")
        if folder in folders:
            assert f"nightmill/{folders[folder]}/{rest}" in names
    assert "nightmill/py.typed" in names  # or mypy of users stops at `from nightmill import jobs`
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"nightmill"}


@pytest.mark.parametrize("installed", ["wheel", "editable"])
def test_a_project_with_jobs_and_a_worker_of_its_own_can_use_it(
    installed: str, wheel: Path, tmp_path: Path
) -> None:
    """As half of all projects have; Celery puts the working folder first on the path."""
    project = tmp_path / "project"
    for package in ("jobs", "worker"):
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text("OURS = True\n")
    environment = worker_env(Settings(data_dir=tmp_path / "data", broker_url="redis://127.0.0.1:1/0"))
    if installed == "wheel":
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
        environment["PYTHONPATH"] = str(tmp_path / "site")
    program = (
        "import jobs, worker, nightmill.jobs\n"
        "assert jobs.OURS and worker.OURS and nightmill.jobs.enqueue\n"
        "print(nightmill.__file__)"
    )
    found = _run(["-c", program], project, environment)
    assert found.startswith(str(tmp_path / "site" if installed == "wheel" else ROOT))
    assert "GGUF file to serve" in _run(
        ["-m", "celery", "-A", "nightmill.worker.app", "worker", "--help"], project, environment
    )
    assert "nightmill worker" in _run(["-m", "nightmill", "--help"], project, environment)


@pytest.mark.parametrize("name", ["jobs", "worker", "migrations", "tests"])
def test_an_editable_installation_adds_no_other_import_name(name: str, tmp_path: Path) -> None:
    program = f"import importlib.util\nassert importlib.util.find_spec({name!r}) is None"
    _run(["-c", program], tmp_path, clean_environment())


def _run(arguments: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What Python prints, started in a folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("target", ["demo", "test"])
@pytest.mark.parametrize("made", [False, True])
def test_make_refuses_an_old_python_at_once(tmp_path: Path, target: str, made: bool) -> None:
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 1\nsleep 600\n')
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    if made:  # by somebody who tried before
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        shutil.copy(old, tmp_path / ".venv" / "bin" / "python")
    python = sys.executable if made else str(old)
    done = subprocess.run(
        ["make", target, f"PYTHON={python}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    remedy = "run `make clean` and then this again" if made else "install it, or name one with PYTHON=..."
    culprit = ".venv/bin/python" if made else str(old)
    assert f"Nightmill needs Python 3.11 or newer, and {culprit} is not: {remedy}" in done.stderr


def test_check_works_where_only_the_client_is_installed(directory: Path) -> None:
    """As with the extra `embedded` alone: what a worker needs cannot be imported."""
    program = (
        "import json, sys\n"
        "for name in ('numpy', 'gguf', 'tokenizers', 'jinja2', 'threadpoolctl', 'pycuda', 'cuda'):\n"
        "    sys.modules[name] = None\n"
        "from click.testing import CliRunner\n"
        "from nightmill.jobs.commands.main import main\n"
        "for line in sys.stdin:\n"
        "    result = CliRunner().invoke(main, json.loads(line))\n"
        "    print(json.dumps([result.exit_code, repr(result.exception), result.output]))\n"
    )
    expected = (
        (["check"], f"this installation is the client only; to generate, {pip_install('worker')}"),
        (["check", "--model", "x.gguf"], "`nightmill check --model` needs numpy, gguf,"),
        (["worker", "--model", "x.gguf"], "`nightmill worker` needs numpy, gguf,"),
        (["plan", "x.jsonl", "--model", "x.gguf"], "`nightmill plan` needs numpy, gguf,"),
        (["run", "x.jsonl", "-o", "y", "--model", "x.gguf"], "`nightmill run` needs numpy, gguf,"),
        (["demo"], "`nightmill demo` needs numpy, gguf,"),
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(json.dumps(arguments) for arguments, _ in expected),
        env=worker_env(Settings(data_dir=directory, broker_url="redis://127.0.0.1:1/0")),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    for line, (_, said) in zip(done.stdout.splitlines(), expected, strict=True):
        code, exception, output = json.loads(line)
        assert (code, exception, said in output) == (1, "SystemExit(1)", True), output
