"""A client, a worker's side of the table, and a file of ten rows."""

from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims
from tests.integration.jobs.batches.rows import write
from tests.support.servers import Clock


@pytest.fixture
def client(server_settings: Settings, clock: Clock) -> Any:
    """A client on SQLite and on PostgreSQL."""
    with Client(server_settings, clock=clock) as made:
        yield made


@pytest.fixture
def worker(client: Client) -> Claims:
    """A worker's side of the table."""
    claims = Claims(client.database, "a" * 32)
    claims.register("host", 1, "model", None)
    return claims


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Ten rows, of which the fourth and the eighth are bad."""
    rows: list[object] = [{"prompt": f"prompt {number}", "seed": number} for number in range(1, 11)]
    rows[3] = "{broken"
    rows[7] = {"prompt": "p", "best_of": 2}
    return write(tmp_path / "prompts.jsonl", rows)
