"""A client, a worker's side of the table, and a batch that has ended."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims
from tests.integration.jobs.verifying.worked import (
    run_all,
)


@pytest.fixture
def client(server_settings: Settings) -> Iterator[Client]:
    """On SQLite and on PostgreSQL, with their own clocks: threads wait for each other."""
    with Client(server_settings) as made:
        yield made


@pytest.fixture
def claims(client: Client) -> Claims:
    """A live worker's side of the table."""
    made = Claims(client.database, "a" * 32)
    made.register("host", 1, "model", None)
    made.beat(WorkerState.READY)
    return made


@pytest.fixture
def night(client: Client, claims: Claims, tmp_path: Path) -> str:
    """A batch of ten rows, of which the fourth is bad and the others have succeeded."""
    rows = [json.dumps({"prompt": f"p{n}", "seed": n, "custom_id": f"q-{n}"}) for n in range(1, 11)]
    rows[3] = "{broken"
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    client.submit_batch(tmp_path / "rows.jsonl", name="night", temperature=0.5)
    run_all(client, claims)
    return "night"
