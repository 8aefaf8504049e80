"""The blocks of docs/recipes do what they say, in environments that have what they import."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nightmill.worker.assembly.model import demo_model
from tests.clients.catalogue import RECIPE_ENVIRONMENTS
from tests.clients.environments import NotInstalledError, environment_folder
from tests.clients.service import Service, serving
from tests.support.needs import Need, missing
from tests.support.pages import RECIPES, Block, blocks
from tests.support.servers import clean_environment, worker_env

MODEL = "qwen2.5-0.5b-instruct-q8_0"  # the name that pages use
NOT_RUN = {
    "lm-eval.md": "pip install 'lm_eval[api]'",
    "airflow.md": "from datetime import datetime, timedelta",
}
NOT_RUN["prefect.md"] = 'nightly(Path("prompts.jsonl"), Path("results.jsonl"))'
ALL = [block for page in RECIPES for block in blocks(page)]
ROWS = [
    {
        "custom_id": f"q-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    }
    for number in range(5)
]
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that pages name."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copy(demo_model(), folder / f"{MODEL}.gguf")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    """A server of this machine, which asks for no key."""
    with serving(folder / "service", folder / f"{MODEL}.gguf", MODEL, key=None) as service:
        yield service


def test_what_is_not_run_is_listed_here_and_says_why_on_its_page() -> None:
    left_out = [block for block in ALL if block.reason is not None]
    assert {block.page: block.text.splitlines()[0] for block in left_out} == NOT_RUN
    assert len(left_out) == len(NOT_RUN) and all(len(block.reason or "") > 20 for block in left_out)
    assert {block.kind for block in ALL} == {"sh", "python"}
    assert {block.page for block in ALL if block.kind == "python"} - {
        "airflow.md"
    } == RECIPE_ENVIRONMENTS.keys()


def run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """What a command prints; it must end in order."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source(page: str, service: Service, kind: str) -> str:
    """The blocks of a page as one program, which asks the server of the test."""
    chosen: list[Block] = [
        block for block in ALL if block.page == page and block.kind == kind and block.reason is None
    ]
    assert chosen
    return "\n".join(block.text for block in chosen).replace("http://127.0.0.1:8080", service.url)


def python_of(page: str) -> str:
    """The interpreter of the page's environment."""
    try:
        return str(environment_folder(RECIPE_ENVIRONMENTS[page], install=False) / "bin" / "python")
    except NotInstalledError:
        missing(Need.CLIENTS)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["langchain.md", "dspy.md"])
def test_reviews_are_judged(page: str, request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> None:
    python = python_of(page)
    program = source(page, request.getfixturevalue("service"), "python")
    environment = clean_environment() | {"HOME": str(tmp_path)}
    lines = run([python, "-c", program], folder, environment).splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [
        "It arrived early.",
        "It broke at once.",
        "I would buy it again.",
    ]
    assert {line.rpartition(" ")[2] for line in lines} <= {"good", "bad"}


@pytest.mark.slow
def test_a_flow_of_prefect_brings_a_file_through_the_night(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path
) -> None:
    python = python_of("prefect.md")
    called = (
        'print("rows:", nightly(Path("prompts.jsonl"), Path("prefect.jsonl"), seconds=0.2))\n'
        'file_id = upload.fn(Path("prompts.jsonl"))\n'
        'print("same:", make_batch.fn(file_id) == make_batch.fn(file_id))\n'
    )
    script = tmp_path / "flow.py"  # Prefect reads the source of a flow
    script.write_text(source("prefect.md", request.getfixturevalue("service"), "python") + "\n" + called)
    environment = clean_environment() | {
        "HOME": str(tmp_path),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    }
    printed = run([python, str(script)], folder, environment)
    assert "rows: 5" in printed and "same: True" in printed
    results = [json.loads(line) for line in (folder / "prefect.jsonl").read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [row["custom_id"] for row in ROWS]


@pytest.mark.slow  # their commands are those of the README, which test_pages.py runs
def test_lines_of_airflow_run_in_a_shell(service: Service, folder: Path) -> None:
    environment = worker_env(service.settings)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run(["bash", "-euc", source("airflow.md", service, "sh")], folder, environment)
    for name in ("results.jsonl", "airflow-results.jsonl"):
        assert len((folder / name).read_text().splitlines()) == len(ROWS)


def test_the_dag_of_airflow_has_the_lines_that_are_run() -> None:
    (dag,) = (block.text for block in ALL if block.page == "airflow.md" and block.kind == "python")
    compile(dag, "airflow.md", "exec")
    (lines,) = (
        block.text
        for block in ALL
        if block.page == "airflow.md" and "watch" in block.text and block.kind == "sh"
    )
    for command in ("nightmill batch submit", "nightmill batch watch", "nightmill batch results"):
        assert command in dag and command in lines
