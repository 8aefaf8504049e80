"""Browser sessions: a cookie made from an API key, and tokens against forged forms.

On a server with keys, people sign in with one of them. The cookie contains the key's holder and a time,
sealed with a random secret that the servers of a database share in SQL. So the digest of a key, which may be
in settings, is not enough to forge a cookie. The seal includes the digest, too: removing a key ends its
sessions. Any server accepts the cookies of another, no list is stored, and deleting the secret ends all
sessions.

Forms carry a token derived from the session, which nobody without the session's cookie can know, whatever
other cookies a page on another port or subdomain may set. Without a session (signing in, or a server without
keys) the token is the value of another cookie. And forms are accepted only from pages of this host, as far as
the browser reports the origin.
"""

import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.keys import ANYBODY, ApiKeys, Caller
from nightmill.jobs.sql.server_secrets import SESSIONS, ServerSecrets

Run = Callable[[Callable[[str], bytes], str], Awaitable[bytes]]

SESSION, FORM = "nightmill_session", "nightmill_form"
TOKEN = "form_token"  # noqa: S105 - the name of a field
SECRET_SECONDS = 60.0  # after which a server checks whether the secret has changed
_SESSION_SECONDS = 12 * 3600
_CLOCKS_DIFFER_SECONDS = 60  # tolerance between two servers
_TIME = re.compile(r"[0-9]{1,12}")
_LONGEST_COOKIE = 300


class SignInNeeded(Exception):  # noqa: N818 - nothing went wrong
    """The caller has not signed in. Never leaves the pages."""


class Sessions:
    """Sessions of browsers, based on a server's keys. Call `load` first for every request."""

    def __init__(self, keys: ApiKeys, secrets: ServerSecrets) -> None:
        self._keys = keys
        self._secrets = secrets
        self._secret = b""
        self._loaded_at = -math.inf

    @property
    def needed(self) -> bool:
        """True if signing in is required at all."""
        return bool(self._keys)

    async def load(self, run: Run) -> None:
        """Load the shared secret, at most SECRET_SECONDS old. Raises DatabaseError.

        run  runs a function on a thread for statements
        """
        if self._keys and time.monotonic() - self._loaded_at >= SECRET_SECONDS:
            self._secret = await run(self._secrets.get, SESSIONS)
            self._loaded_at = time.monotonic()

    def caller(self, request: Request) -> Caller:
        """Return the signed-in caller; raises SignInNeeded."""
        if not self._keys:
            return ANYBODY
        name, _, rest = request.cookies.get(SESSION, "")[:_LONGEST_COOKIE].partition("|")
        ends, _, seal = rest.partition("|")
        now = time.time()
        if _TIME.fullmatch(ends) and now < int(ends) <= now + _SESSION_SECONDS + _CLOCKS_DIFFER_SECONDS:
            for digest, caller in self._keys.holders():
                if caller.name == name and _same(self._seal(digest, name, ends), seal):
                    return caller
        raise SignInNeeded

    def sign_in(self, response: Response, key: str, *, secure: bool) -> Caller | None:
        """Sign in the holder of a key; None if it is invalid."""
        found = self._keys.find(key)
        if found is None:
            return None
        digest, caller = found
        ends = str(int(time.time()) + _SESSION_SECONDS)
        value = f"{caller.name}|{ends}|{self._seal(digest, caller.name or '', ends)}"
        _keep(response, SESSION, value, secure=secure, seconds=_SESSION_SECONDS)
        return caller

    def _seal(self, digest: bytes, name: str, ends: str) -> str:
        assert self._secret, "the secret was not loaded"
        sealed = f"session|{name}|{ends}|{digest.hex()}"
        return hmac.new(self._secret, _bytes(sealed), hashlib.sha256).hexdigest()

    def sign_out(self, response: Response) -> None:
        """Remove the session's cookie."""
        response.delete_cookie(SESSION)


def form_token(request: Request) -> str:
    """Return the token for the forms of a page. Without a session, `keep_token` stores it in a cookie."""
    if session := request.cookies.get(SESSION, ""):
        return _token_of(session)
    known = request.cookies.get(FORM, "")
    if len(known) == 43 and known.isascii():
        return known
    if not hasattr(request.state, "form_token"):
        request.state.form_token = secrets.token_urlsafe(32)
    return str(request.state.form_token)


def keep_token(request: Request, response: Response) -> None:
    """Set the cookie of this page's form token, if it is new."""
    if hasattr(request.state, "form_token"):
        _keep(response, FORM, request.state.form_token, secure=request.url.scheme == "https")


def check_token(request: Request, form: Mapping[str, str]) -> None:
    """Raise HttpError unless a form has this session's token."""
    session = request.cookies.get(SESSION, "")
    wanted = _token_of(session) if session else request.cookies.get(FORM, "")
    if not wanted or not _same(wanted, form.get(TOKEN, "")):
        raise HttpError(403, "this form is too old, or not of this page: go back, and try again", code="form")


def check_origin(request: Request) -> None:
    """Raise HttpError for a form from another host's page, as far as the browser reports it.

    Browsers send Origin with every POST, Sec-Fetch-Site over TLS and to this machine; pages can set neither.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    try:
        there = "" if origin is None else urlsplit(origin).netloc.lower()
    except ValueError:  # for example an IPv6 address without its closing bracket
        there = "?"
    host = request.headers.get("host", "").lower()
    if site not in ("same-origin", "none") or (origin is not None and there != host):
        raise HttpError(
            403,
            "this form was sent by a page of another host: open the page here, and try again; if a proxy "
            "stands before this server, it must pass on the header Host as the browser sent it",
            code="foreign_origin",
        )


def _token_of(session: str) -> str:
    return hmac.new(_bytes(session), b"form", hashlib.sha256).hexdigest()


def _same(one: str, other: str) -> bool:
    """Compare in constant time, for any bytes."""
    return hmac.compare_digest(_bytes(one), _bytes(other))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _keep(response: Response, name: str, value: str, *, secure: bool, seconds: int | None = None) -> None:
    response.set_cookie(
        name, value, max_age=seconds, httponly=True, samesite="strict", secure=secure, path="/"
    )
