"""`nightmill run` on models with states and experts: results of files, with the tokens of transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from tests.integration.worker.conftest import on_sqlite
from tests.support.servers import worker_env
from tests.tiny import expected, unpacked

PATIENCE = 240.0


@on_sqlite
@pytest.mark.parametrize("name", ["qwen35-q8_0", "lfm2-bf16", "gptoss-q8_0", "gemma4-bf16"])
def test_rows_of_a_file_become_the_tokens_of_transformers(
    name: str, jobs_client: Client, quick: Settings, tmp_path: Path
) -> None:
    """All prompts in company, three at once, so that pieces of prompts and drawn tokens share steps."""
    settings = quick.model_copy(update={"reference": True, "model": unpacked(name, tmp_path)})
    prompts = expected(name)["prompts"]
    asked = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    source, results = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": one["prompt"]} | asked) + "\n" for one in prompts))
    done = subprocess.run(
        [sys.executable, "-m", "nightmill", "run", str(source), "-o", str(results)],
        env=worker_env(settings) | {"NIGHTMILL_MAX_SEQUENCES": "3"},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    drawn = [[token["id"] for token in row["answers"][0]["logprobs"]] for row in rows]
    assert drawn == [one["greedy"] for one in prompts]
