"""Who looks at a page: a cookie made of an API key, and tokens that forms of these pages alone have.

A server with keys lets a browser in after one of them was typed. The cookie that it gets names the key's
holder and a time, under a seal made with a random secret that the servers of a database share in SQL. The
digest of a key, which stands in settings, is therefore not enough to make one. The digest goes into the seal
as well: a key that is taken away takes its sessions with it. Any server knows the cookie of another, nobody
keeps a list, and who deletes the secret ends all sessions.

A form of these pages carries a token that is made of the session, so nobody has it who does not have the
session's cookie, whatever other cookies a page on another port or subdomain may set. Where there is no
session (signing in, or a server without keys) the token is what another cookie holds. And a form is taken
only from a page of this host, as far as the browser says where it comes from.
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
from nightmill.jobs.server.keys import ANYBODY, Caller, Keys
from nightmill.jobs.sql.server_secrets import SESSIONS, ServerSecrets

Run = Callable[[Callable[[str], bytes], str], Awaitable[bytes]]

SESSION, FORM = "nightmill_session", "nightmill_form"
TOKEN = "form_token"  # noqa: S105 - the name of a field
SECRET_SECONDS = 60.0  # after which a server looks whether the secret is still the same
_SESSION_SECONDS = 12 * 3600
_CLOCKS_DIFFER_SECONDS = 60  # of two servers
_TIME = re.compile(r"[0-9]{1,12}")
_LONGEST_COOKIE = 300


class SignInNeeded(Exception):  # noqa: N818 - nothing went wrong
    """Nobody has signed in. Never leaves the pages."""


class Sessions:
    """Lets browsers in by the keys of a server. `load` before anything else, for every request."""

    def __init__(self, keys: Keys, secrets: ServerSecrets) -> None:
        self._keys = keys
        self._secrets = secrets
        self._secret = b""
        self._loaded_at = -math.inf

    @property
    def needed(self) -> bool:
        """Whether one has to sign in at all."""
        return bool(self._keys)

    async def load(self, run: Run) -> None:
        """Have the secret of all servers, as it was at most SECRET_SECONDS ago. Raises DatabaseError.

        run  calls a function on a thread for statements
        """
        if self._keys and time.monotonic() - self._loaded_at >= SECRET_SECONDS:
            self._secret = await run(self._secrets.get, SESSIONS)
            self._loaded_at = time.monotonic()

    def caller(self, request: Request) -> Caller:
        """Who looks; raises SignInNeeded."""
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
        """Let the holder of a key in; None if it is nobody's."""
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
        """Forget who it was."""
        response.delete_cookie(SESSION)


def form_token(request: Request) -> str:
    """What the forms of a page carry. Without a session, `keep_token` has the browser keep it."""
    if session := request.cookies.get(SESSION, ""):
        return _token_of(session)
    known = request.cookies.get(FORM, "")
    if len(known) == 43 and known.isascii():
        return known
    if not hasattr(request.state, "form_token"):
        request.state.form_token = secrets.token_urlsafe(32)
    return str(request.state.form_token)


def keep_token(request: Request, response: Response) -> None:
    """Set the cookie that belongs to this page's forms, if it is new."""
    if hasattr(request.state, "form_token"):
        _keep(response, FORM, request.state.form_token, secure=request.url.scheme == "https")


def check_token(request: Request, form: Mapping[str, str]) -> None:
    """Raise HttpError unless a form is one of our own pages', made for this session."""
    session = request.cookies.get(SESSION, "")
    wanted = _token_of(session) if session else request.cookies.get(FORM, "")
    if not wanted or not _same(wanted, form.get(TOKEN, "")):
        raise HttpError(403, "this form is too old, or not of this page: go back, and try again", code="form")


def check_origin(request: Request) -> None:
    """Raise HttpError for a form that a page of another host sends, as far as the browser tells.

    Browsers send Origin with every POST, Sec-Fetch-Site over TLS and to this machine; pages can set neither.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    try:
        there = "" if origin is None else urlsplit(origin).netloc.lower()
    except ValueError:  # as for an IPv6 address without its end
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
    """As `==`, in a time that says nothing; whatever bytes a stranger sent."""
    return hmac.compare_digest(_bytes(one), _bytes(other))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _keep(response: Response, name: str, value: str, *, secure: bool, seconds: int | None = None) -> None:
    response.set_cookie(
        name, value, max_age=seconds, httponly=True, samesite="strict", secure=secure, path="/"
    )
