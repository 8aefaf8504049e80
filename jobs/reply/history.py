"""The history of a job: what it was each time before it was queued again with other parameters."""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from nightmill.jobs.base.contract import JsonObject

EXTEND = "extend"
RETRY = "retry"


def former(
    row: Mapping[str, Any], params: Mapping[str, Any], seed: int, kind: str, now: datetime
) -> JsonObject:
    """Return the entry for a row that gets these parameters and this seed: what changes, and how it ended.

    Of the text there are its length and digest: the text of an extended job begins with it.
    """
    was = row["params"] if isinstance(row["params"], Mapping) else {}
    changed = {name: was.get(name) for name in {*was, *params} if was.get(name) != params.get(name)}
    entry: JsonObject = {
        "change": kind,
        "at": now.isoformat(),
        "attempt": row["attempt"],
        "state": str(row["state"]),
        "stop_reason": row["stop_reason"],
        "params": dict(sorted(changed.items())),
        "completion_tokens": row["completion_tokens"],
        "arithmetic": row["arithmetic"],
    }
    if row["seed"] != seed:
        entry["seed"] = row["seed"]
    if row["reused_from"] is not None:
        entry["reused_from"] = row["reused_from"]
    if row["text"]:
        entry |= {"characters": len(row["text"]), "text_sha256": _digest(row["text"])}
    return entry


def begins_with(text: str | None, entry: JsonObject) -> bool | None:
    """Return whether a text begins with the former one of an entry; None if that had no text.

    It does if one arithmetic computed both, unless the former one ended within a character or within what
    became a stop sequence.
    """
    length, digest = entry.get("characters"), entry.get("text_sha256")
    if type(length) is not int or digest is None:
        return None
    return text is not None and len(text) >= length and _digest(text[:length]) == digest


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
