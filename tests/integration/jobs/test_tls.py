"""Redis with TLS: no password goes to a server that nobody has verified, unless its URL gives that up."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from celery import signals
from kombu.exceptions import OperationalError

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import BrokerUnreachableError
from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.messages.tls import describe_sslmode, describe_tls
from nightmill.worker.app import make_worker_app
from tests.support.servers import RedisServer
from tests.support.tls import LOCALHOST, OTHER, TlsServer, tls_before


@pytest.fixture
def target(redis_server: RedisServer) -> tuple[str, int]:
    parts = urlsplit(redis_server.url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


@pytest.fixture(params=[LOCALHOST, OTHER], ids=["untrusted", "another name"])
def stranger(
    request: pytest.FixtureRequest, target: tuple[str, int], tmp_path: Path
) -> Iterator[tuple[TlsServer, Path]]:
    with tls_before(target, request.param, tmp_path) as made:
        yield made


def pinged(url: str) -> None:
    Broker(Settings(broker_url=url)).ping()


def test_a_server_that_is_not_verified_gets_no_password(stranger: tuple[TlsServer, Path]) -> None:
    server, _ = stranger
    with pytest.raises(BrokerUnreachableError):
        pinged(f"rediss://:S3CRET@localhost:{server.port}/0")
    assert bytes(server.sent) == b""


def test_a_certificate_for_another_name_is_not_enough(target: tuple[str, int], tmp_path: Path) -> None:
    with tls_before(target, OTHER, tmp_path) as (server, path):
        with pytest.raises(BrokerUnreachableError):
            pinged(f"rediss://localhost:{server.port}/0?ssl_ca_certs={path}")
        assert bytes(server.sent) == b""
        pinged(f"rediss://localhost:{server.port}/0?ssl_ca_certs={path}&ssl_check_hostname=false")


def test_a_verified_server_and_one_by_name_unverified_are_talked_to(
    target: tuple[str, int], tmp_path: Path
) -> None:
    with tls_before(target, LOCALHOST, tmp_path) as (server, path):
        pinged(f"rediss://localhost:{server.port}/0?ssl_ca_certs={path}")
        assert b"PING" in bytes(server.sent)
        pinged(f"rediss://localhost:{server.port}/0?ssl_cert_reqs=none")


@pytest.mark.parametrize("stranger", [OTHER], indirect=True)
@pytest.mark.parametrize("query", ["", "?ssl_ca_certs={path}"])
def test_a_workers_consumer_verifies_the_server_too(
    stranger: tuple[TlsServer, Path], query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is Celery's own, which may be made long after the start."""
    server, path = stranger
    url = f"rediss://:S3CRET@localhost:{server.port}/0{query.format(path=path)}"
    monkeypatch.setenv("NIGHTMILL_BROKER_URL", url)
    app = make_worker_app()
    signals.celeryd_init.send(sender="worker", conf=app.conf)
    with app.connection_for_read() as connection, pytest.raises(OperationalError, match="certificate"):
        connection.ensure_connection(max_retries=1, timeout=5.0)
    assert bytes(server.sent) == b""


def test_tls_to_a_server_without_ends(target: tuple[str, int]) -> None:
    with pytest.raises(BrokerUnreachableError):
        pinged(f"rediss://localhost:{target[1]}/0")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://host/0", ""),
        (None, ""),
        ("rediss://host/0", "TLS, the server's certificate is verified by this machine's authorities"),
        ("rediss://host/0?ssl_cert_reqs=none", "TLS, but the server is not verified (ssl_cert_reqs=none)"),
        (
            "rediss://host/0?ssl_ca_certs=/a.pem",
            "TLS, the server's certificate is verified by the authorities in /a.pem",
        ),
    ],
)
def test_what_is_verified_is_said(url: str | None, said: str) -> None:
    assert describe_tls(url) == said


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "the server is not verified (sslmode=prefer: "),
        ("?sslmode=verify-full", "TLS, the server's certificate and name"),
    ],
)
def test_what_of_a_postgresql_is_verified_is_said(query: str, said: str) -> None:
    settings = Settings(database_url=f"postgresql://db.example/nightmill{query}")
    assert describe_sslmode(settings.resolved_database_url).startswith(said)
    assert describe_sslmode(Settings(database_url="sqlite:////x.db").resolved_database_url) == ""
