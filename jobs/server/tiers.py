"""Service tiers: the priority of calls, and how long they wait.

`default` is interactive: before all batches, in slots that workers reserve. `flex` has the priority of
batches and no reserved slot, for programs that send bulk work as single calls.
"""

from contextvars import ContextVar
from enum import StrEnum

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.request.prompts import json_type
from nightmill.jobs.server.errors import invalid

FIELD = "service_tier"
"""Key of a body for the tier."""


class Tier(StrEnum):
    """The tier in responses."""

    DEFAULT = "default"
    FLEX = "flex"


asked_tier: ContextVar[Tier] = ContextVar("asked_tier", default=Tier.DEFAULT)
"""Tier of the current call."""
NAMES = (*Tier, "auto", "priority", "scale", "standard_only")
"""Allowed names in a body: OpenAI's, and Anthropic's last. `auto` is the key's own tier; those after it are
served as `default`."""


def tier_of(body: JsonObject, usual: Tier) -> Tier:
    """Take the tier out of a body; `usual` is the key's own. Raises HttpError."""
    name = body.pop(FIELD, None)
    if name is None or name == "auto":
        return usual
    if not isinstance(name, str):
        raise invalid(FIELD, f"must be a text, not {json_type(name)}")
    if name not in NAMES:
        raise invalid(FIELD, f"must be one of {', '.join(NAMES)} (got {name[:60]!r})")
    return Tier.FLEX if name == Tier.FLEX else Tier.DEFAULT
