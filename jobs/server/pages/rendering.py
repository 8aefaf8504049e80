"""HTML templates, and filters that format numbers, times and states. Everything is escaped."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from nightmill.jobs.base.printable import printable
from nightmill.jobs.request.limits import describe_amount, describe_share
from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.keys import Caller, Right
from nightmill.jobs.server.pages.session import TOKEN, form_token, keep_token

HERE = Path(__file__).parent
STATIC = {"pages.css": "text/css", "pages.js": "text/javascript", "icon.svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_ACTING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_TIMES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class PageRenderer:
    """A renderer of HTML templates."""

    def __init__(self) -> None:
        loader = FileSystemLoader(HERE / "templates")
        self._environment = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self._environment.filters |= {
            "number": number, "moment": moment, "clock": clock, "ago": ago, "span": span, "shown": shown,
            "whole": whole,
        }  # fmt: skip
        self._environment.globals |= {"version": version("nightmill"), "token_field": TOKEN}
        self._environment.globals |= {"amount": describe_amount, "share": describe_share}
        self._static = {name: (HERE / "static" / name).read_bytes() for name in STATIC}

    def page(
        self, request: Request, template: str, caller: Caller | None, values: Mapping[str, Any],
        *, status: int = 200,
    ) -> Response:  # fmt: skip
        """Render a page for `caller`; None: not signed in. `request.state` has the time."""
        made = self._environment.get_template(template).render(
            values,
            caller=caller,
            can_submit=caller is not None and caller.right is not Right.READ,
            token=form_token(request),
            now=getattr(request.state, "now", None) or datetime.now(UTC),
            path=request.url.path,
            root=root_of(request),
        )
        response = HTMLResponse(made, status, headers=HEADERS)
        keep_token(request, response)
        return response

    async def static(self, request: Request) -> Response:
        """GET /static/NAME: the style, the script and the icon."""
        name = request.path_params["name"]
        if name not in self._static:
            raise HttpError(404, f"there is no {printable(name, 80)!r}", code="unknown_url")
        headers = {"Cache-Control": "public, max-age=3600", "X-Content-Type-Options": "nosniff"}
        return Response(self._static[name], headers=headers, media_type=STATIC[name])


def root_of(request: Request) -> str:
    """Return the server's root as seen from a page: links are relative, so that a proxy may add a prefix."""
    return "../" * (request.url.path.count("/") - 1) or "./"


def redirect(request: Request, path: str) -> RedirectResponse:
    """Redirect to a page of this server; `path` begins with a slash."""
    return RedirectResponse(root_of(request) + path[1:], 303)


def number(value: float | None) -> str:
    """Format a number as 12,345; a dash if unknown."""
    return "–" if value is None else f"{value:,.0f}"


def moment(value: datetime | None) -> str:
    """Format a time as 2026-11-23 04:05:06 UTC."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(value: datetime | None) -> str:
    """Format a time as 04:05."""
    return "" if value is None else value.astimezone(UTC).strftime("%H:%M")


def span(value: timedelta | float | None) -> str:
    """Format a duration by its two largest units: 3 h 5 min."""
    if value is None:
        return "–"
    left = int(value.total_seconds() if isinstance(value, timedelta) else value)
    if left < 1:
        return "0 s"
    parts: list[str] = []
    for seconds, unit in _TIMES:
        count, left = divmod(left, seconds)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(filter(None, parts))


def ago(value: datetime | None, now: datetime) -> str:
    """Format a time relative to now: 5 min ago, in 3 h."""
    if value is None:
        return "–"
    gone = (now - value).total_seconds()
    if abs(gone) < 1:
        return "now"
    return f"{span(gone)} ago" if gone > 0 else f"in {span(-gone)}"


def whole(text: str) -> str:
    """Return untrusted text with its lines, without characters that affect a browser or clipboard."""
    return _ACTING.sub("\ufffd", text)


def shown(value: object, longest: int = 200) -> str:
    """Return untrusted text on one line, without characters that affect a terminal or browser."""
    return printable(str(value), longest)
