"""Database and broker URLs: checked, shown without secrets, and removed from foreign messages.

A URL that the grammar here does not match is refused and never shown: a password with an unencoded / must
not appear in a log in part.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote, unquote_plus

UNREADABLE = "a URL that cannot be parsed"
_HIDDEN = "***"
_ENCODE = "where all of a password but letters, digits and - . _ ~ is percent-encoded, as / in %2F"
_WORD = r"[!$-.0-9;<=>A-Z\\^_`a-z{|}~]"  # ASCII characters of a user name that need no escape
_HOST = r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:@/?#\[\]]*)(?::(?P<port>\d{1,5}))?"
_REST = r"(?P<path>/[^\s?#@]*)?(?:\?(?P<query>[^\s#@]*))?"
_SERVER = re.compile(
    rf"(?P<scheme>[a-z]+(?:\+[a-z0-9_]+)?)://"
    rf"(?:(?P<user>{_WORD}*)(?P<password>:(?:{_WORD}|:)*)?@)?{_HOST}{_REST}"
)
# SQLAlchemy takes a password to the @, whatever is in it: also a port, a path, and a query that has an @.
# So what ends a host elsewhere must be encoded in a password. A file's name may hold anything.
_POSTGRES = re.compile(
    rf"(?P<scheme>postgres(?:ql)?(?:\+[a-z0-9_]+)?)://"
    rf"(?:(?P<user>[^\s:@/?#]*)(?P<password>:[^\s@/?#]*)?@)?{_HOST}{_REST}"
)
_FILE = re.compile(r"(?P<scheme>sqlite(?:\+[a-z0-9_]+)?)://(?P<path>/[^?]*)?(?:\?(?P<query>.*))?")
_TLS: dict[str, tuple[str, ...] | None] = {
    "ssl_ca_certs": None,
    "ssl_cert_reqs": ("required", "none"),
    "ssl_certfile": None,
    "ssl_check_hostname": ("true", "false"),
    "ssl_keyfile": None,
}
"""TLS settings of a Redis URL and their allowed values; None: a file."""
PREPARE_THRESHOLD = "prepare_threshold"
"""The only parameter of the driver itself: executions of a statement before it is prepared. Others are
libpq's."""
NEVER = "none"
_DRIVERS = {"sqlite": ("", "pysqlite"), "postgresql": ("", "psycopg")}
# Names in a query whose values everybody may see; others, and names without a value, may be secrets.
_OPEN_BROKER = frozenset({"virtual_host", "ssl_cert_reqs", "ssl_check_hostname"})
_OPEN_FILE = frozenset({"mode", "uri", "cache", "timeout", "immutable", "nolock", "vfs"})
_OPEN_SERVER = frozenset(
    {"host", "port", "sslmode", "connect_timeout", "target_session_attrs", "keepalives", PREPARE_THRESHOLD}
)
_KNOWN = frozenset(
    {"password", "passfile", "options", "user", "dbname", "application_name", "sslkey", "sslcert"}
)
_OPEN = _OPEN_BROKER | _OPEN_FILE | _OPEN_SERVER
_SHORT_SECRET = 4

_WHOLE = r"-?\d{1,9}"
_TYPED = {
    "connect_timeout": (_WHOLE, "a whole number"),
    "keepalives": ("[01]", "0 or 1"),
    "keepalives_count": (_WHOLE, "a whole number"),
    "keepalives_idle": (_WHOLE, "a whole number"),
    "keepalives_interval": (_WHOLE, "a whole number"),
    "port": (r"\d{1,5}(,\d{1,5})*", "a port"),
    PREPARE_THRESHOLD: (rf"\d{{1,9}}|{NEVER}", "a whole number, or none: never"),
    "sslmode": (
        "disable|allow|prefer|require|verify-ca|verify-full",
        "one of disable, allow, prefer, require, verify-ca, verify-full",
    ),
    "target_session_attrs": (
        "any|read-write|read-only|primary|standby|prefer-standby",
        "one of any, read-write, read-only, primary, standby, prefer-standby",
    ),
    "tcp_user_timeout": (_WHOLE, "a whole number"),
    "timeout": (r"\d+(\.\d+)?", "a number of seconds"),  # SQLite's parameters follow
    "uri": ("true|false", "true or false"),
    "mode": ("ro|rw|rwc|memory", "one of ro, rw, rwc, memory"),
    "cache": ("shared|private", "shared or private"),
    "immutable": ("[01]", "0 or 1"),
    "nolock": ("[01]", "0 or 1"),
}
"""Patterns of parameter values that are checked here; the server or the driver checks the others."""
# Arguments of the driver that are not parameters.
_NO_PARAMETERS = frozenset({"autocommit", "context", "cursor_factory", "row_factory"})
_SEVERAL = frozenset({"host", "port"})


@dataclass(frozen=True, slots=True)
class _Parts:
    scheme: str
    user: str | None
    password: str | None  # with its colon
    host: str
    port: str
    path: str
    query: tuple[tuple[str, str | None], ...]

    def shown(self) -> str:
        """Return the URL without its secrets."""
        who = ""
        if self.password is not None:
            who = f"{self.user}:{_HIDDEN}@"
        elif self.user is not None:
            who = f"{self.user if self.scheme.startswith('postgres') else _HIDDEN}@"
        port = f":{self.port}" if self.port else ""
        items = [
            f"{name}={value}" if name in _OPEN and value is not None else _HIDDEN
            for name, value in self.query
        ]
        query = "?" + "&".join(items) if items else ""
        return f"{self.scheme}://{who}{self.host}{port}{self.path}{query}"

    def secrets(self) -> Iterable[str]:
        """Return the parts that `shown` hides."""
        if self.password is not None:
            yield self.password[1:]
        elif self.user is not None and not self.scheme.startswith("postgres"):
            yield self.user
        for name, value in self.query:
            if name not in _OPEN:
                yield value or ""
            if name not in _OPEN | _KNOWN:
                yield name


def shown_url(url: str) -> str:
    """Format a URL for people: secrets are hidden, and a URL that cannot be parsed is not shown at all."""
    parts = _parse(url)
    return UNREADABLE if parts is None else parts.shown()


def check_broker_url(url: str) -> None:
    """Raise ValueError unless the URL is a Redis URL; the message does not quote it."""
    if not url.startswith(("redis://", "rediss://", "redis+socket://")):
        raise ValueError("must start with redis://, rediss:// or redis+socket://")
    parts = _parse(url)
    if parts is None:
        raise ValueError(f"is not a URL; expected e.g. redis://:password@host:6379/0, {_ENCODE}")
    if parts.user and not parts.password:
        raise ValueError("names a user and no password; expected e.g. redis://:password@host:6379/0")
    names = {name for name, _ in parts.query}
    if parts.scheme == "redis+socket":
        if names - {"virtual_host"}:
            raise ValueError("may have nothing but virtual_host=NUMBER, the database, after its ?")
        return
    if not re.fullmatch(r"/?\d*", parts.path):
        raise ValueError("must end with the number of a database, as in redis://:password@host:6379/0")
    if names and parts.scheme != "rediss":
        raise ValueError("may have settings after its ? only as rediss://, with TLS")
    for name, value in parts.query:
        if name not in _TLS:
            raise ValueError(f"may have nothing but {', '.join(_TLS)} after its ?")
        if (known := _TLS[name]) is not None and value not in known:
            raise ValueError(f"has a {name} that is not one of {', '.join(known)}")


def check_database_url(url: str) -> None:
    """Raise ValueError unless the URL names a supported database; the message does not quote it."""
    parts = _parse(url)
    if parts is None:
        example = "postgresql+psycopg://user:password@host/nightmill"
        raise ValueError(f"is not a database URL; expected e.g. {example}, {_ENCODE}")
    backend, _, driver = parts.scheme.partition("+")
    if backend == "postgres":
        raise ValueError("begins with postgres://: write postgresql:// in its place")
    if backend not in ("sqlite", "postgresql"):
        raise ValueError(f"names {backend!r}; Nightmill speaks sqlite and postgresql")
    if driver not in _DRIVERS[backend]:
        raise ValueError(f"names the driver {driver!r}: write {backend}:// alone")
    if backend == "sqlite" and not {name for name, _ in parts.query} <= _OPEN_FILE:
        raise ValueError(f"may have nothing but {', '.join(sorted(_OPEN_FILE))} after its ?")
    _check_parameters(parts.query)


def _check_parameters(query: Iterable[tuple[str, str | None]]) -> None:
    """Raise ValueError for database parameters that the driver cannot handle."""
    seen: set[str] = set()
    for name, value in query:
        if name in _NO_PARAMETERS:
            raise ValueError(f"has {name} after its ?, which is no parameter of PostgreSQL's libpq")
        if name in seen - _SEVERAL:
            raise ValueError("has the same parameter twice after its ?")
        seen.add(name)
        if name in _TYPED and not re.fullmatch(_TYPED[name][0], unquote_plus(value or "")):
            raise ValueError(f"has a {name} that is not {_TYPED[name][1]}")


def scrubbed(text: str, *urls: str | None) -> str:
    """Remove the URLs and their secrets, encoded or not, from `text`, which is often a foreign error."""
    for url in urls:
        if url is None:
            continue
        parts = _parse(url)
        text = text.replace(url, shown_url(url))
        if parts is None:
            continue
        found = {
            spelling
            for secret in parts.secrets()
            for spelling in (secret, unquote(secret), unquote_plus(secret))
        }
        found |= {repr(secret)[1:-1] for secret in found} | {secret.replace("'", "''") for secret in found}
        for secret in sorted(found - {""}, key=len, reverse=True):
            pattern = re.escape(secret)
            # As a whole word only; gaps inside words would reveal a short secret.
            if len(secret) < _SHORT_SECRET:
                pattern = rf"(?<!\w){pattern}(?!\w)"
            text = re.sub(pattern, _HIDDEN, text)
    return text


def _parse(url: str) -> _Parts | None:
    grammar = _FILE if url.startswith("sqlite") else _POSTGRES if url.startswith("postgres") else _SERVER
    match = grammar.fullmatch(url)
    found = {} if match is None else match.groupdict()
    if not found or int(found.get("port") or 0) > 65535:
        return None
    items = [item.partition("=") for item in (found["query"] or "").split("&") if item]
    return _Parts(
        found["scheme"],
        found.get("user"),
        found.get("password"),
        found.get("host") or "",
        found.get("port") or "",
        found["path"] or "",
        tuple((name, value if equals else None) for name, equals, value in items),
    )
