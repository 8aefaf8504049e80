"""Who looks at a page: a cookie made of an API key, and tokens that forms of these pages alone have.

A server with keys lets a browser in after one of them was typed. The cookie that it gets names the key's
holder and a time, under a seal that only who has the key, or its digest, can make: a key that is taken away
takes its sessions with it, any server knows the cookie of another, and nobody keeps a list. A page's forms
carry what another cookie holds, which other sites can neither read nor, with SameSite=Strict, send.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.keys import ANYBODY, Caller, Keys

SESSION, FORM = "nightmill_session", "nightmill_form"
TOKEN = "form_token"  # noqa: S105 - the name of a field
_SESSION_SECONDS = 12 * 3600
_LONGEST_COOKIE = 300


class SignInNeeded(Exception):  # noqa: N818 - nothing went wrong
    """Nobody has signed in. Never leaves the pages."""


class Sessions:
    """Lets browsers in by the keys of a server."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    @property
    def needed(self) -> bool:
        """Whether one has to sign in at all."""
        return bool(self._keys)

    def caller(self, request: Request) -> Caller:
        """Who looks; raises SignInNeeded."""
        if not self._keys:
            return ANYBODY
        name, _, rest = request.cookies.get(SESSION, "")[:_LONGEST_COOKIE].partition("|")
        ends, _, seal = rest.partition("|")
        if ends.isascii() and ends.isdigit() and int(ends) > time.time():
            for digest, caller in self._keys.holders():
                if caller.name == name and hmac.compare_digest(_seal(digest, name, ends), seal):
                    return caller
        raise SignInNeeded

    def sign_in(self, response: Response, key: str, *, secure: bool) -> Caller | None:
        """Let the holder of a key in; None if it is nobody's."""
        found = self._keys.find(key)
        if found is None:
            return None
        digest, caller = found
        ends = str(int(time.time()) + _SESSION_SECONDS)
        value = f"{caller.name}|{ends}|{_seal(digest, caller.name or '', ends)}"
        _keep(response, SESSION, value, secure=secure, seconds=_SESSION_SECONDS)
        return caller

    def sign_out(self, response: Response) -> None:
        """Forget who it was."""
        response.delete_cookie(SESSION)


def form_token(request: Request) -> str:
    """What the forms of a page carry; `keep_token` has the browser keep it."""
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
    """Raise HttpError unless a form is one of our own pages'."""
    kept, sent = request.cookies.get(FORM, ""), form.get(TOKEN, "")
    if not kept or not hmac.compare_digest(kept.encode(), sent.encode()):
        raise HttpError(403, "this form is too old, or not of this page: go back, and try again", code="form")


def _keep(response: Response, name: str, value: str, *, secure: bool, seconds: int | None = None) -> None:
    response.set_cookie(
        name, value, max_age=seconds, httponly=True, samesite="strict", secure=secure, path="/"
    )


def _seal(digest: bytes, name: str, ends: str) -> str:
    return hmac.new(digest, f"session|{name}|{ends}".encode(), hashlib.sha256).hexdigest()
