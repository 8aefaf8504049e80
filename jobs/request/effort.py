"""The effort of reasoning that is asked for, in OpenAI's words, as variables of chat templates."""

from typing import Any

from nightmill.jobs.base.contract import JsonObject

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_DEGREES = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Templates know three degrees; these stand for one of them."""


def effort_fault(effort: Any) -> str | None:
    """Return what is wrong with an effort, or None."""
    if isinstance(effort, str) and effort in EFFORTS:
        return None
    return f"must be one of {', '.join(EFFORTS)} (got {str(effort)[:100]!r})"


def effort_variables(effort: str) -> JsonObject:
    """Return template variables for an effort: a switch (Qwen, Granite) or a degree (gpt-oss)."""
    thinks = effort != "none"
    degree = {"reasoning_effort": _DEGREES.get(effort, effort)} if thinks else {}
    return {"enable_thinking": thinks, "thinking": thinks} | degree
