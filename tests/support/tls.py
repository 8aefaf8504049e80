"""A server with TLS before another one, for tests: certificates of its own, and what callers have sent it."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

# Certificates that nobody trusts, valid for a century, with their keys, which guard nothing.
LOCALHOST = """-----BEGIN CERTIFICATE-----
MIIBoDCCAUWgAwIBAgIUYmPt5HbBIrX9stLc1CTC3VgKF5IwCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwObG9jYWxob3N0LnRlc3QwIBcNMjYxMTI1MTk1MDE5WhgPMjEy
NjExMDExOTUwMTlaMBkxFzAVBgNVBAMMDmxvY2FsaG9zdC50ZXN0MFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAENFyC0kTcIP1ylKR0QbFmhQ5SgOmKQjXO0fqMcEIN
iANzgwUWshfqnCAbrmgrW6UEafhjt/lOoTDJx61Avdsr6qNpMGcwHQYDVR0OBBYE
FJA5zdc9RSKNVVepharVH1vvRw7VMB8GA1UdIwQYMBaAFJA5zdc9RSKNVVepharV
H1vvRw7VMBQGA1UdEQQNMAuCCWxvY2FsaG9zdDAPBgNVHRMBAf8EBTADAQH/MAoG
CCqGSM49BAMCA0kAMEYCIQCNvr2qBCrZiOQ6YvfuiKAcH1HzqFmMWyTI4pSZ+Yz5
nAIhAKDwn8n3R6+2Jlxv+QvFhpgio72fvS4/j6O9f5nj6NM5
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgOymgDaZOzxOoBTLM
08S1mSVUaccx59w7Mh75WvUhkIqhRANCAAQ0XILSRNwg/XKUpHRBsWaFDlKA6YpC
Nc7R+oxwQg2IA3ODBRayF+qcIBuuaCtbpQRp+GO3+U6hMMnHrUC92yvq
-----END PRIVATE KEY-----
"""
OTHER = """-----BEGIN CERTIFICATE-----
MIIBmDCCAT6gAwIBAgIUN5f00Rx7ZGcXCC0TCemFVZEx9UAwCgYIKoZIzj0EAwIw
FTETMBEGA1UEAwwKb3RoZXIudGVzdDAgFw0yNjExMjUxOTUwMTlaGA8yMTI2MTEw
MTE5NTAxOVowFTETMBEGA1UEAwwKb3RoZXIudGVzdDBZMBMGByqGSM49AgEGCCqG
SM49AwEHA0IABDygC1Ch6nXZY2jjrCDI/0jpIshU6NE4Zu9nrS5PqRwWbNQtvgIR
TYuTnsVdh6k6Z33B4mUWfLWW38GqXVI6xiijajBoMB0GA1UdDgQWBBQhOG7Ylc+9
niKc+Tz9tNvgFXzX0TAfBgNVHSMEGDAWgBQhOG7Ylc+9niKc+Tz9tNvgFXzX0TAV
BgNVHREEDjAMggpvdGhlci50ZXN0MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0E
AwIDSAAwRQIhALLlpWekPAGi7Xm0qZLYT47Dti1Ul2lxy6sjTwKP7NCfAiB+yCbF
5kajmPpASq05u0yhnePr1Jl8TubYF8uPbmPRSg==
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgqTjjaBj1p5vrEJnW
28N3KR/4hy/yw8bwnhZACjSWAO+hRANCAAQ8oAtQoep12WNo46wgyP9I6SLIVOjR
OGbvZ60uT6kcFmzULb4CEU2Lk57FXYepOmd9weJlFny1lt/Bql1SOsYo
-----END PRIVATE KEY-----
"""


class TlsServer:
    """Takes connections with TLS and passes what comes to a server of this machine.

    sent  what callers have sent inside of TLS
    """

    def __init__(self, certificate: Path, target: tuple[str, int]) -> None:
        self.sent = bytearray()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate)
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=[caller], daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with suppress(OSError), closing(caller):
            caller.settimeout(20.0)
            inside = self._context.wrap_socket(caller, server_side=True)
            with closing(inside), socket.create_connection(self._target, timeout=20.0) as server:
                back = threading.Thread(target=self._copy, args=[server, inside], daemon=True)
                back.start()
                while data := inside.recv(65536):
                    self.sent += data
                    server.sendall(data)

    @staticmethod
    def _copy(source: socket.socket, target: ssl.SSLSocket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)


@contextmanager
def tls_before(target: tuple[str, int], certificate: str, folder: Path) -> Iterator[tuple[TlsServer, Path]]:
    """Such a server, and the file of its certificate, by which it can be verified."""
    path = folder / "server.pem"
    path.write_text(certificate, encoding="utf-8")
    server = TlsServer(path, target)
    try:
        yield server, path
    finally:
        server.close()
