"""The proxy that freezes connections does so, and tells the two ways apart."""

import socket
from contextlib import suppress

import pytest

from tests.support.freezing import Freeze, FreezingProxy

_TCP_USER_TIMEOUT = 18


def _connected(proxy: FreezingProxy) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=2.0)
    client.sendall(b"a")
    assert client.recv(1) == b"a"
    return client


@pytest.mark.parametrize("how", list(Freeze))
def test_open_connections_freeze_and_new_ones_work(echo: tuple[str, int], how: Freeze) -> None:
    with FreezingProxy(echo) as proxy, _connected(proxy) as client:
        assert proxy.freeze(how) == 1
        client.sendall(b"b")
        with pytest.raises(TimeoutError):
            client.recv(1)
        _connected(proxy).close()
        proxy.thaw()
        _connected(proxy).close()


def test_only_silence_lets_the_kernel_give_a_connection_up(echo: tuple[str, int]) -> None:
    errors = {}
    for how in Freeze:
        with FreezingProxy(echo) as proxy, _connected(proxy) as client:
            client.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, 500)
            client.settimeout(6.0)
            proxy.freeze(how)
            client.sendall(b"b")
            with pytest.raises(OSError) as raised:
                client.recv(1)
            errors[how] = raised.value.errno  # None: Python's own time limit
    assert errors[Freeze.ACKNOWLEDGED] is None
    assert errors[Freeze.SILENT] is not None


def test_new_connections_to_a_host_that_is_gone_are_not_even_refused(echo: tuple[str, int]) -> None:
    with FreezingProxy(echo) as proxy:
        proxy.freeze(Freeze.SILENT, new=True)
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=1.0)
        proxy.thaw()
        _connected(proxy).close()


def test_what_was_frozen_is_closed_at_the_thaw(echo: tuple[str, int]) -> None:
    with FreezingProxy(echo) as proxy, _connected(proxy) as client:
        proxy.freeze(Freeze.ACKNOWLEDGED)
        proxy.thaw()
        with suppress(ConnectionError):
            assert client.recv(1) == b""
