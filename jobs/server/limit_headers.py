"""The headers by which a caller gives a batch of OpenAI's API a budget, or a share of rows that may fail."""

from typing import Final

from starlette.requests import Request

from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.request.limits import Limits

HEADERS: Final = {"budget": "X-Nightmill-Budget", "max_failures": "X-Nightmill-Max-Failures"}


def limits_asked(request: Request) -> dict[str, str]:
    """Return the limits that the headers give, as settings of a batch; raises InvalidParameterError."""
    found = {name: request.headers.get(header) for name, header in HEADERS.items()}
    settings = {name: value for name, value in found.items() if value is not None}
    try:
        Limits.of(settings)
    except InvalidParameterError as error:
        raise error.renamed(HEADERS[error.field or "budget"]) from None
    return settings
