"""Typed server-sent events, as in OpenAI's responses and Anthropic's messages."""

import json

from nightmill.jobs.base.contract import JsonObject


def typed_event(data: JsonObject) -> str:
    """Format one event, named by the `type` of its object."""
    return f"event: {data['type']}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
