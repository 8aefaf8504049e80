"""Runs the application: uvicorn, where it listens, and what it logs."""

import logging
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import uvicorn

from nightmill.jobs.client import Client
from nightmill.jobs.errors import DeliveryDelayedWarning, SettingsError
from nightmill.jobs.last_resort import LastResort
from nightmill.jobs.logs import fit
from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.connections import Connection, allow_connections, is_news
from nightmill.jobs.server.desk import Limits
from nightmill.jobs.server.guards import is_loopback
from nightmill.jobs.server.keys import Keys
from nightmill.jobs.settings import Settings

log = logging.getLogger("nightmill.server")

_END_SECONDS = 30  # for answers that are under way when the server is told to stop
_LAST_SECONDS = 15.0  # and then for the rest; whatever hangs, the process is gone after both
_HEADER_BYTES = 1 << 16
_SWITCH_SECONDS = 0.0005
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """A server that ends in order at SIGTERM and Ctrl-C: uvicorn's own raises the signal again at its end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let signals end the server while it runs."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(settings: Settings, host: str, port: int, limits: Limits) -> None:
    """Answer requests until a signal.

    Raises SettingsError where strangers could hand in work, and where the address cannot be had.
    """
    keys = Keys.parse(settings.api_keys)
    if not keys and not is_loopback(host):
        raise SettingsError(
            f"--host {host} can be reached from other machines: say who may hand in work, with "
            "NIGHTMILL_API_KEYS=NAME=KEY, or listen on 127.0.0.1"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    fit(logging.getLogger().handlers, settings.log_format, settings.scrubbed)
    # Which of its own plugins Alembic sets up is of no use to whoever runs a server.
    logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_news)
    allow_connections()
    # The thread that reads files and writes results would keep the event loop waiting for 5 ms at each of the
    # many times that this needs the interpreter. While rows were entered, a list of jobs came after 14 ms in
    # the median and 79 ms at the 99th percentile, in place of 20 and 300 (2 cores with other work besides).
    sys.setswitchinterval(_SWITCH_SECONDS)
    # A broker that is away delays jobs; that workers find them is no news at every request.
    warnings.simplefilter("ignore", DeliveryDelayedWarning)
    with Client(settings) as client:
        client.database.ensure_schema()
        client.announce_apart()
        server = _Server(
            uvicorn.Config(
                make_app(client, keys, limits),
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                http=Connection,
                server_header=False,
                h11_max_incomplete_event_size=_HEADER_BYTES,
                timeout_graceful_shutdown=_END_SECONDS,
            )
        )
        LastResort(lambda: server.should_exit, _END_SECONDS + _LAST_SECONDS, what="server").start()
        server.run(_listen(host, port))


def _listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of a host."""
    with ExitStack() as opened:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
            sockets = [
                opened.enter_context(socket.create_server(address, family=family))
                for family, address in addresses
            ]
        except OSError as error:
            said = (error.strerror or str(error)).partition(" (")[0].lower()  # Python adds the address
            raise SettingsError(
                f"cannot listen on {host}, port {port}: {said}; give another with --host or --port"
            ) from None
        opened.pop_all()
        shown = f"[{host}]" if ":" in host else host
        log.info("listening on http://%s:%d; Ctrl-C ends it", shown, port)
        return sockets
