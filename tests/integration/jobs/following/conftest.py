"""A client on both databases, and a worker of it that is its claims alone."""

from collections.abc import Iterator

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims
from tests.integration.jobs.following.rows import registered
from tests.support.servers import Clock


@pytest.fixture
def client(server_settings: Settings, clock: Clock) -> Iterator[Client]:
    with Client(server_settings, clock=clock) as made:
        yield made


@pytest.fixture
def worker(client: Client) -> Claims:
    return registered(client, "a")
