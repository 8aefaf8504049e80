"""A worker that is behind a pooler in transaction mode, as all who ask it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from tests.integration.worker.conftest import on_postgresql
from tests.support.pgbouncer import pgbouncer
from tests.support.servers import worker_env

ROWS = 60


@pytest.mark.slow
@on_postgresql
def test_a_night_passes_through_a_pooler(quick: Settings, tmp_path: Path) -> None:
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "Once", "max_tokens": 8, "ignore_eos": true}\n' * ROWS)
    with pgbouncer(quick.database_url or "") as url:
        settings = quick.model_copy(update={"database_url": url, "shard_size": 4})
        command = [sys.executable, "-m", "nightmill", "run", str(prompts), "-o", str(results), "--name", "a"]
        done = subprocess.run(
            command, env=worker_env(settings), capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        with Client(settings) as client:
            assert client.get_batch("a").status().succeeded == ROWS
    assert len({json.loads(line)["id"] for line in results.read_text().splitlines()}) == ROWS
