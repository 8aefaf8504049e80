"""Redis or the database hangs (SIGSTOP): the server refuses, accepts and ends within what it states."""

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.messages.embedded import EmbeddedRedis
from tests.support.freezing import suspended
from tests.support.servers import http_process, start_postgres, start_redis, wait_until

CALLERS = 10  # more than there are threads for statements
PATIENCE = 60.0  # what a machine with much else to do may need; without limits nobody would ever be answered
STATED_END = 45.0  # seconds after SIGTERM


@contextmanager
def serving(settings: Settings, log: Path) -> Iterator[tuple[httpx2.Client, "subprocess.Popen[bytes]"]]:
    """A client of a server that has taken a job already, and its process."""
    with (
        http_process(settings, log) as (url, process),
        httpx2.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        assert http.post("/v1/jobs", json={"prompt": "a"}).status_code == 202
        yield http, process


def _at_once(http: httpx2.Client) -> list[Any]:
    with ThreadPoolExecutor(CALLERS) as pool:
        asked = [pool.submit(http.post, "/v1/jobs", json={"prompt": "a"}) for _ in range(CALLERS)]
        return [one.result() for one in asked]


def _ends(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(STATED_END + PATIENCE)


@pytest.mark.parametrize("embedded", [False, True])
def test_a_redis_that_hangs_holds_up_nobody(tmp_path: Path, embedded: bool) -> None:
    with start_redis(tmp_path / "redis") as redis:
        url = None if embedded else redis.url
        settings = Settings(data_dir=tmp_path / "data", broker_url=url)
        own = EmbeddedRedis(settings.data_dir)
        try:
            with serving(settings, tmp_path / "log") as (http, process):
                pid = int((own.directory / "redis.pid").read_text()) if embedded else redis.pid
                with suspended(pid):
                    accepted = _at_once(http)
                    assert [one.status_code for one in accepted] == [202] * CALLERS
                    assert len(http.get("/v1/jobs").json()["data"]) == CALLERS + 1
                    assert http.get("/health").status_code == 200
                    ready = http.get("/ready")
                    assert ready.status_code == 503
                    assert ready.json()["database"] is True
                    assert ready.json()["hangs"] == ["broker"]
                    _ends(process)
            with Client(settings) as client:
                assert len(client.list_jobs(limit=50)) == CALLERS + 1
        finally:
            if embedded:
                own.stop()


def test_a_database_that_hangs_is_told_as_away(tmp_path: Path) -> None:
    with start_redis(tmp_path / "redis") as redis, start_postgres() as postgres:
        database_url = postgres.create_database()
        settings = Settings(data_dir=tmp_path, broker_url=redis.url, database_url=database_url)
        with Client(settings) as client:
            client.database.migrate()
        with serving(settings, tmp_path / "log") as (http, process):
            with suspended(postgres.pid, children=True):
                began = time.monotonic()
                refused = _at_once(http)
                assert {one.status_code for one in refused} == {503}
                assert {one.json()["error"]["code"] for one in refused} == {"unavailable"}
                assert time.monotonic() - began < PATIENCE
                assert http.get("/health").status_code == 200
                assert http.get("/ready").json()["hangs"] == ["database"]
                assert http.get("/").status_code == 503
            wait_until(lambda: http.post("/v1/jobs", json={"prompt": "a"}).status_code == 202)
            with suspended(postgres.pid, children=True):
                _ends(process)
