"""What `pip install` gets: everything that is read at run time, and nothing that hides another package."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jobs.settings import Settings
from tests.servers import worker_env

ROOT = Path(__file__).resolve().parents[2]


def test_wheel_carries_kernels_migrations_and_the_demo_model(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("nightmill-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    revisions = {path.name for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert {f"jobs/_migrations/versions/{name}" for name in revisions} <= names
    assert {"jobs/_migrations/env.py", "worker/_models/nightmill-demo.gguf"} <= names
    assert {f"worker/_cuda/{path.name}" for path in (ROOT / "cuda").iterdir()} <= names
    assert {"jobs/py.typed", "worker/py.typed"} <= names  # or mypy of users stops at `import jobs`
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"jobs", "worker"}


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
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    remedy = "run `make clean` and then this again" if made else "install it, or name one with PYTHON=..."
    culprit = ".venv/bin/python" if made else str(old)
    assert f"Nightmill needs Python 3.11 or newer, and {culprit} is not: {remedy}" in done.stderr


def test_check_works_where_only_the_client_is_installed(directory: Path) -> None:
    """As after `pip install nightmill[embedded]`: what a worker needs cannot be imported."""
    program = (
        "import json, sys\n"
        "for name in ('numpy', 'gguf', 'tokenizers', 'jinja2', 'threadpoolctl', 'pycuda', 'cuda'):\n"
        "    sys.modules[name] = None\n"
        "from click.testing import CliRunner\n"
        "from jobs.cli import main\n"
        "for line in sys.stdin:\n"
        "    result = CliRunner().invoke(main, json.loads(line))\n"
        "    print(json.dumps([result.exit_code, repr(result.exception), result.output]))\n"
    )
    expected = (
        (["check"], "this installation is the client only; to generate, pip install 'nightmill[worker]'"),
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
        timeout=60,
        check=True,
    )
    for line, (_, said) in zip(done.stdout.splitlines(), expected, strict=True):
        code, exception, output = json.loads(line)
        assert (code, exception, said in output) == (1, "SystemExit(1)", True), output
