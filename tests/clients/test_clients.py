"""Client libraries get what they ask for, from the bundled model and from a real one."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nightmill.worker.assembly.model import demo_model
from tests.clients.catalogue import CLIENTS, ClientLibrary
from tests.clients.documented import documented_failures, unexpected
from tests.clients.environments import NotInstalledError, environment_folder
from tests.clients.running import run_client, table
from tests.clients.service import REAL, TINY, Service, serving
from tests.support.needs import Need, missing
from tests.support.real_model import real_model

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(2700)]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """A server with each model."""
    folder = tmp_path_factory.mktemp("services")
    files = {TINY: demo_model(), REAL: real_model()}
    with ExitStack() as stack:
        yield [stack.enter_context(serving(folder / name, path, name)) for name, path in files.items()]


def test_what_is_listed_as_failing_is_a_client_that_is_tried() -> None:
    assert {name for name, _ in documented_failures()} <= {client.name for client in CLIENTS}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_does_what_its_users_do(
    client: ClientLibrary, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if client.needs_node and shutil.which("npm") is None:
        missing(Need.NODE)
    try:
        folder = environment_folder(client.environment, install=False)
    except NotInstalledError:
        missing(Need.CLIENTS)
    services: list[Service] = request.getfixturevalue("services")  # only now: their start takes a while
    result = run_client(client, folder, services, tmp_path)
    assert not unexpected([result]), table([result])
