"""Running the application with uvicorn: sockets, signals and logs."""

import logging
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import uvicorn

from nightmill.jobs.base.last_resort import LastResort
from nightmill.jobs.base.logs import fit
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DeliveryDelayedWarning, IgnoredColumnWarning, SettingsError
from nightmill.jobs.server.app import make_app
from nightmill.jobs.server.connections import Connection, allow_connections, is_news
from nightmill.jobs.server.guards import check_origins, is_loopback
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.server.keys import ApiKeys

log = logging.getLogger("nightmill.server")

_END_SECONDS = 30  # for open requests when the server is told to stop
_LAST_SECONDS = 15.0  # then for the rest; after both, the process ends by force
_HEADER_BYTES = 1 << 16
_SWITCH_SECONDS = 0.0005
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """A server that ends in order at SIGTERM and Ctrl-C: uvicorn's would raise the signal again at its
    end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the server on signals in this block."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    settings: Settings, host: str, port: int, limits: ServerLimits, origins: Sequence[str] = ()
) -> None:
    """Serve requests until a signal.

    origins  origins of other pages that may call it from a browser

    Raises SettingsError if strangers could submit work, or if the address is not available.
    """
    keys = ApiKeys.parse(settings.api_keys)
    if not keys and not is_loopback(host):
        raise SettingsError(
            f"--host {host} can be reached from other machines: say who may submit work, with "
            "NIGHTMILL_API_KEYS=NAME=KEY, or listen on 127.0.0.1"
        )
    check_origins(origins, keys=bool(keys))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    fit(logging.getLogger().handlers, settings.log_format, settings.scrubbed)
    # Alembic's messages about its plugins are of no use here.
    logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_news)
    allow_connections()
    # The thread that reads files and writes results would keep the event loop waiting for 5 ms at each of the
    # many times that this needs the interpreter. While rows were entered, a list of jobs came after 14 ms in
    # the median and 79 ms at the 99th percentile, in place of 20 and 300 (2 cores with other work besides).
    sys.setswitchinterval(_SWITCH_SECONDS)
    # An unreachable broker only delays jobs; one warning is enough.
    for category in (DeliveryDelayedWarning, IgnoredColumnWarning):
        warnings.simplefilter("ignore", category)
    with Client(settings) as client:
        client.database.ensure_schema()
        client.announce_apart()
        server = _Server(
            uvicorn.Config(
                make_app(client, keys, limits, origins),
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
    """Open a listening socket for each address of a host."""
    with ExitStack() as opened:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
            sockets = [
                opened.enter_context(socket.create_server(address, family=family))
                for family, address in addresses
            ]
        except OSError as error:
            said = (error.strerror or str(error)).partition(" (")[0].lower()  # Python appends the address
            raise SettingsError(
                f"cannot listen on {host}, port {port}: {said}; give another with --host or --port"
            ) from None
        opened.pop_all()
        shown = f"[{host}]" if ":" in host else host
        log.info("listening on http://%s:%d; Ctrl-C ends it", shown, port)
        return sockets
