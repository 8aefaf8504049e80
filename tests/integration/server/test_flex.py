"""Flex calls from 64 connections at once: none is turned away or too late, nor is who calls beside them."""

import asyncio
from pathlib import Path

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.sql.jobs import Selection
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from tests.support import instant_worker
from tests.support.flex import DAY, NIGHT, Answers, call, flex_calls, http_client, running_server

pytestmark = pytest.mark.heavy
CALLS, CONNECTIONS, ALONE = 128, 64, 10


async def measure(url: str) -> tuple[Answers, Answers]:
    """Answers to the flex calls, and to interactive ones, ALONE before these and the others beside them."""
    async with http_client(url, DAY, 1) as day, http_client(url, NIGHT, CONNECTIONS) as night:
        beside = Answers([await call(day, number) for number in range(ALONE)])
        flood = asyncio.ensure_future(flex_calls(night, CALLS, CONNECTIONS))
        while not flood.done():
            beside[await call(day, beside.total())] += 1
            await asyncio.sleep(0.05)
        return await flood, beside


def test_flex_calls_from_many_connections_end_well(sqlite_settings: Settings, directory: Path) -> None:
    settings = sqlite_settings.model_copy(update={"model": demo_model()})
    with (
        Client(settings) as client,
        running_worker(client, directory / "worker.log", command=instant_worker.COMMAND),
        running_server(client, directory / "server.log") as url,
    ):
        flex, beside = asyncio.run(measure(url))
        assert flex == {(200, "flex"): CALLS}
        assert {status for status, _ in beside} == {200}
        assert beside.total() > ALONE
        jobs = list(client.store.find(Selection(states=[JobState.SUCCEEDED]), limit=10_000))
        ranks = [job.priority for job in jobs if job.owner == "night"]
        assert ranks == [5] * CALLS
        assert {job.priority for job in jobs if job.owner == "day"} == {INTERACTIVE}
