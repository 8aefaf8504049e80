"""What strangers do to a server: it answers the others meanwhile. `benchmarks.endurance` does more of it."""

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.server import connections
from nightmill.jobs.server.connections import Connection, is_news
from tests.support.odd_requests import ODD_BODIES, ODD_HEADS, POSTED_TO
from tests.support.servers import wait_until
from tests.unit.server.conftest import BOB, Server

PATIENCE = 120.0


@pytest.fixture
def server(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Impatient, and for few."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(Connection, "most", 10)
    with start(worker=False) as server:
        yield server


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE)


def cut_off(connection: socket.socket, said: bytes) -> None:
    """Say this again and again, until the server has closed the connection."""
    give_up_at = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < give_up_at:
            connection.sendall(said)
            time.sleep(0.02)
    except TimeoutError:
        pytest.fail("the server neither reads nor closes")
    except OSError:
        return
    pytest.fail("the server still listens")


def answers(server: Server) -> bool:
    with contextlib.suppress(Exception), server.http() as http:
        return http.get("/health").status_code == 200
    return False


def test_who_says_nothing_or_says_it_slowly_is_not_waited_for(server: Server) -> None:
    silent, slow = [connect(server) for _ in range(8)], connect(server)
    assert answers(server)
    cut_off(slow, b"G")
    assert all(one.recv(1) == b"" for one in silent)
    with server.http() as http:  # a connection that is used again has as long for each request
        for _ in range(3):
            assert http.get("/health").status_code == 200
            time.sleep(0.2)


def test_more_connections_than_there_is_room_for_are_closed_at_once(server: Server) -> None:
    held = [connect(server) for _ in range(10)]
    with connect(server) as beyond, contextlib.suppress(ConnectionResetError):
        assert beyond.recv(1) == b""
    for one in held:
        one.close()
    wait_until(lambda: answers(server))


def test_who_does_not_read_is_not_waited_for(server: Server) -> None:
    with connect(server) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        cut_off(lazy, request * 100)
    assert answers(server)


def test_what_is_no_request_is_refused_and_logged_by_nobody(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for said in ODD_HEADS:
        with connect(server) as stranger, contextlib.suppress(ConnectionResetError):
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(64)[9:10] in (b"3", b"4", b"")  # or sent to sign in
    with server.http() as http:
        for number, body in enumerate(ODD_BODIES):
            answer = http.post(
                POSTED_TO[number % len(POSTED_TO)], content=body, headers={"Content-Type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert not [one.getMessage() for one in caplog.records if is_news(one) and one.levelno > logging.INFO]


def test_a_forged_id_and_another_s_are_answered_alike(server: Server) -> None:
    job_id = server.client.enqueue("secret")
    said = []
    with server.http(BOB) as http:
        for one in (job_id, IdSource().draw()):
            for path in ("/v1/jobs/{}", "/v1/jobs/{}/events"):
                answer = http.get(path.format(one))
                said.append((answer.status_code, answer.text.replace(one, "")))
    assert said[:2] == said[2:]
    assert {status for status, _ in said} == {404}
