"""A POST to a URL that a stranger may have named, safe against redirection to internal addresses.

The name is resolved once and the connection made to that address, so that a name cannot be public when
checked and local when called (DNS rebinding). There are no redirects and no proxies, only the status of the
response is read, and everything has one time limit.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress

from nightmill.jobs.base.targets import Target

SECONDS = 15.0
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What IANA's registries of special addresses hold and Python 3.11 takes for addresses of the internet: relays
# of 6to4, protocol assignments, local NAT64, dummies, segment routing and documentation.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        ("192.88.99.0/24", "192.0.0.0/24", "64:ff9b:1::/48", "100:0:0:1::/64", "5f00::/16", "3fff::/20"),
    )
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NotDeliveredError(Exception):
    """The webhook was not delivered; the message says why in a few words and quotes nothing of the
    response."""


def post(target: Target, headers: Mapping[str, str], body: bytes, *, private: bool = False) -> int:
    """Send the request; returns the status of the response.

    private  allow addresses that are not public: loopback, link-local, private networks

    Raises NotDeliveredError.
    """
    address = _resolved(target, private)
    connection = _Pinned(target, address)
    # A socket's timeout applies to each read; a receiver that sends one byte at a time would block for ever.
    alarm = threading.Timer(SECONDS, connection.cut)
    alarm.daemon = True
    alarm.start()
    try:
        connection.request("POST", target.path + target.query, body, {"Host": target.authority, **headers})
        status = connection.getresponse().status
        if connection.was_cut:  # cut within the headers, which then look complete
            raise TimeoutError
        return status
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: cut in the middle of TLS
        if connection.was_cut or isinstance(error, TimeoutError):
            raise NotDeliveredError(f"no answer within {SECONDS:.0f} s") from None
        if isinstance(error, ssl.SSLError):
            why = getattr(error, "verify_message", None) or error.reason or "handshake"
            raise NotDeliveredError(f"TLS failed: {why}") from None
        said = error.strerror if isinstance(error, OSError) else None
        raise NotDeliveredError((said or type(error).__name__).lower()) from None
    finally:
        alarm.cancel()
        connection.close()


def is_public(address: Address) -> bool:
    """Return True for an address of the internet, which must not embed one that is not."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    if any(address in network for network in _SPECIAL if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _resolved(target: Target, private: bool) -> str:
    """Resolve the target's host to an address that may be called."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise NotDeliveredError("its host is not known") from None
    addresses = [str(address[0]) for *_, address in found]
    if not private and not all(
        is_public(ipaddress.ip_address(address.partition("%")[0])) for address in addresses
    ):
        raise NotDeliveredError("its host has an address that is not public (NIGHTMILL_WEBHOOK_PRIVATE)")
    return addresses[0]


class _Pinned(http.client.HTTPConnection):
    """A connection to a fixed address, independent of later name resolution."""

    def __init__(self, target: Target, address: str) -> None:
        super().__init__(target.host, target.port, timeout=SECONDS)
        self._target = target
        self._address = address
        self.was_cut = False

    def connect(self) -> None:
        """Connect, and verify for https that the certificate matches the host."""
        self.sock = socket.create_connection((self._address, self._target.port), SECONDS)
        if self._target.scheme == "https":
            self.sock = ssl.create_default_context().wrap_socket(
                self.sock, server_hostname=self._target.host, do_handshake_on_connect=False
            )
            self.sock.do_handshake()

    def cut(self) -> None:
        """Close the connection from another thread."""
        self.was_cut = True
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
