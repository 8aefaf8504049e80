"""TLS to servers and its verification: Redis verifies unless its URL disables that; PostgreSQL as in
libpq."""

import ssl
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from sqlalchemy import URL

SCHEME: Final = "rediss://"
_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def split_tls(url: str) -> tuple[str, dict[str, Any] | None]:
    """Split a checked URL from its `ssl_...` settings, returned as redis-py's options; None without TLS.

    Celery's transport verifies nothing unless told to.
    """
    if not url.startswith(SCHEME):
        return url, None
    said = dict(parse_qsl(urlsplit(url).query))
    verified = said.get("ssl_cert_reqs", "required") == "required"
    options: dict[str, Any] = {
        "ssl_cert_reqs": ssl.CERT_REQUIRED if verified else ssl.CERT_NONE,
        "ssl_check_hostname": verified and said.get("ssl_check_hostname", "true") == "true",
    }
    options |= {name: said[name] for name in _FILES if name in said}
    return url.partition("?")[0], options


def describe_tls(url: str | None) -> str:
    """Describe the verification of a Redis for people; empty without TLS."""
    _, options = split_tls(url or "")
    if options is None:
        return ""
    if options["ssl_cert_reqs"] is ssl.CERT_NONE:
        return "TLS, but the server is not verified (ssl_cert_reqs=none)"
    by = options.get("ssl_ca_certs")
    authorities = f"the authorities in {by}" if by else "this machine's authorities"
    name = "" if options["ssl_check_hostname"] else ", its name is not (ssl_check_hostname=false)"
    return f"TLS, the server's certificate is verified by {authorities}{name}"


def describe_sslmode(url: "URL") -> str:
    """Describe the verification of a PostgreSQL for people; empty for other databases and on this machine."""
    if url.get_backend_name() != "postgresql" or url.host in (None, "", "localhost", "127.0.0.1", "::1"):
        return ""
    said = url.query.get("sslmode", "prefer")
    mode = said if isinstance(said, str) else said[-1]
    what = {
        "verify-full": "TLS, the server's certificate and name are verified",
        "verify-ca": "TLS, the server's certificate is verified, its name is not",
        "disable": "no TLS",
    }.get(mode, "the server is not verified")
    remedy = "" if mode.startswith("verify-") else ": ?sslmode=verify-full&sslrootcert=system verifies it"
    return f"{what} (sslmode={mode}{remedy})"
