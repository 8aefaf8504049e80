"""A TCP proxy whose connections freeze on demand, as those behind a firewall, a NAT or a lost host do.

    with FreezingProxy(("127.0.0.1", 6379)) as proxy:  # or the path of a Unix socket
        ...                                            # clients use 127.0.0.1, port proxy.port
        proxy.freeze(Freeze.ACKNOWLEDGED)              # connections that are open; new ones work
        proxy.freeze(Freeze.SILENT, new=True)          # new ones, too: a host that is gone
        proxy.thaw()                                   # what was frozen is closed, new connections work

Both ways of freezing leave the client's connection open, and no byte ever comes back:

    ACKNOWLEDGED  the proxy reads on and drops what it reads, so that TCP's own timers see a living peer
    SILENT        the kernel drops arriving packets before TCP sees them (a socket filter), so that nothing is
                  acknowledged: neither data nor keepalives, nor the first packet of a new connection

`suspended` is for servers that are processes: SIGSTOP, and SIGCONT at the end.
"""

import ctypes
import enum
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

import psutil  # type: ignore[import-untyped]

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""

_ATTACH_FILTER: Final = 26  # SO_ATTACH_FILTER, <asm-generic/socket.h>
_DETACH_FILTER: Final = 27
_RETURN_0: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF, `ret #0`: keep no byte of the packet


class Freeze(enum.Enum):
    """What becomes of what a client sends over a frozen connection."""

    ACKNOWLEDGED = enum.auto()
    SILENT = enum.auto()


class _Link:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.frozen: Freeze | None = None

    def start(self) -> None:
        for source, target in ((self.client, self.server), (self.server, self.client)):
            threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def freeze(self, how: Freeze) -> None:
        if how is Freeze.SILENT:
            _drop_packets(self.client)
        self.frozen = how

    def close(self) -> None:
        for end in (self.client, self.server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.frozen is None:
                    target.sendall(data)
        if self.frozen is None:
            self.close()


class FreezingProxy:
    """A proxy to one server, on a free port of this host."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._links: list[_Link] = []
        self._new: Freeze | None = None
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self, how: Freeze, *, new: bool = False) -> int:
        """Freeze the connections that are open, and with `new` those that come; returns how many are open."""
        with self._lock:
            if new:
                self._new = how
                if how is Freeze.SILENT:
                    _drop_packets(self._listening)
            open_ones = [link for link in self._links if link.client.fileno() >= 0]
            for link in open_ones:
                link.freeze(how)
            return len(open_ones)

    def thaw(self) -> None:
        """Close what is frozen, and let new connections through."""
        with self._lock:
            self._new = None
            with suppress(OSError):  # it had no filter
                self._listening.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            for link in self._links:
                if link.frozen is not None:
                    link.close()
            self._links = [link for link in self._links if link.frozen is None]

    def close(self) -> None:
        """End every connection, and listen no more."""
        with self._lock:
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            for link in self._links:
                link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                try:
                    server = _connect(self._target)
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    link = _Link(client, server)
                    if self._new is not None:
                        link.freeze(self._new)
                    self._links.append(link)
                    link.start()


def _connect(target: Address) -> socket.socket:
    if isinstance(target, tuple):
        return socket.create_connection(target)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(target)
    return connection


def _drop_packets(end: socket.socket) -> None:
    """Have the kernel drop what arrives at a socket. It copies the filter."""
    code = ctypes.create_string_buffer(_RETURN_0, len(_RETURN_0))
    end.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))


@contextmanager
def suspended(pid: int, *, children: bool = False) -> Iterator[None]:
    """Suspend a process, and with `children` those that it has started; they go on at the end."""
    process = psutil.Process(pid)
    pids = [pid, *(child.pid for child in process.children(recursive=True))] if children else [pid]
    for one in pids:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in pids:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)
