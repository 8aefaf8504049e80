"""Webhook URLs, and lists of allowed ones."""

import re
import unicodedata
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote

LONGEST = 2000  # characters
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::(?P<port>\d{1,5}))?"
    r"(?P<path>/[!$-;=@-Z_a-z~]*)?(?P<query>\?[!$-;=?@-Z_a-z~]*)?"
)
_TREACHEROUS = re.compile(r"[/\\%\x00-\x1f\x7f]")
_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Target:
    """A URL in parts, without user, password and fragment, which a target must not have."""

    scheme: str
    host: str  # an IPv6 address without its brackets
    port: int
    path: str  # with its leading slash, which is always there
    query: str = ""  # with its question mark, or empty

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL. Raises ValueError that says what is wrong and quotes nothing."""
        scheme, separator, rest = url.partition("://")
        host, slash, tail = rest.partition("/")
        found = _URL.fullmatch(f"{scheme.lower()}{separator}{host.lower()}{slash}{tail}")
        if found is None or len(url) > LONGEST or int(found["port"] or 0) > 65535:
            raise ValueError(
                f"must be a URL as https://host/path, in ASCII, of at most {LONGEST:,} characters, without "
                "user, password and fragment"
            )
        path = found["path"] or "/"
        if not _is_plain(path):
            raise ValueError(
                "must have a plain path: no empty segments, none that are . or begin with .., and no encoded "
                "/, \\, %, control characters or bytes that are not UTF-8"
            )
        port = int(found["port"] or _PORTS[found["scheme"]])
        return cls(found["scheme"], found["host"].strip("[]"), port, path, found["query"] or "")

    @property
    def authority(self) -> str:
        """The host and port, as in a URL and in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def allows(self, other: "Target") -> bool:
        """Return True if `other` is this URL or below it."""
        mine = (self.scheme, self.host, self.port)
        below = self.path if self.path.endswith("/") else f"{self.path}/"
        return mine == (other.scheme, other.host, other.port) and (
            other.path == self.path or other.path.startswith(below)
        )


def _is_plain(path: str) -> bool:
    """Return True if every receiver interprets the path in the same way.

    Some cut parameters off (`..;x`), decode twice (`%252e`), fold full-width dots, or take `//` and
    backslashes for `/`: after that, a path below an allowed one would not be below it any more.
    """
    first, *segments = path.split("/")
    if first or "" in segments[:-1]:
        return False
    try:
        decoded = [unicodedata.normalize("NFKC", unquote(segment, errors="strict")) for segment in segments]
    except UnicodeDecodeError:
        return False
    return not any(
        segment.startswith("..") or segment.partition(";")[0].strip() == "." or _TREACHEROUS.search(segment)
        for segment in decoded
    )


def parse_allowed(text: str | None) -> tuple[Target, ...]:
    """Parse a list of URLs separated by commas. Raises ValueError."""
    targets = []
    for number, url in enumerate(filter(None, (part.strip() for part in (text or "").split(","))), 1):
        try:
            target = Target.parse(url)
        except ValueError as error:
            raise ValueError(f"entry {number} {error}") from None
        if target.query:
            raise ValueError(f"entry {number} must have no query: it allows any")
        targets.append(target)
    return tuple(targets)
