"""OpenAI's metadata: a few names with short texts."""

from typing import Any

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.formats.rows import invalid
from nightmill.jobs.formats.shapes import mapping
from nightmill.jobs.request.fields import check_option

_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


def read_metadata(value: Any) -> JsonObject:
    """Parse `metadata`; raises InvalidRequestError."""
    if value is None:
        return {}
    value = mapping(value, "metadata", "an object")
    good = len(value) <= _MOST_PAIRS and all(
        isinstance(one, str) and len(one) <= _LONGEST_VALUE and len(name) <= _LONGEST_KEY
        for name, one in value.items()
    )
    if not good:
        raise invalid(
            "metadata",
            f"must have at most {_MOST_PAIRS} names of up to {_LONGEST_KEY} characters, with texts of up to "
            f"{_LONGEST_VALUE}",
        )
    check_option("metadata", value)
    return dict(value)
