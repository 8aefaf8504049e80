"""Replies in tests of reading: tools that they may call, and a text that comes in pieces."""

import random

from nightmill.jobs.base.contract import Markup, Tools
from nightmill.jobs.reply.parsing import Reading, Reply

TOOLS = Tools([{"type": "function", "function": {"name": name}} for name in ("weather", "news")])
THINK = ("<think>", "</think>")


def in_pieces(text: str, markup: Markup, draw: random.Random) -> Reply:
    reading = Reading(markup, TOOLS, "j")
    parts, left = [], text
    while left:
        size = draw.choice((1, 2, 3, 7, 40_000))
        parts += reading.push(left[:size])
        left = left[size:]
    parts += reading.end()
    calls = tuple(part.call for part in parts if part.call is not None)
    thoughts = "".join(part.reasoning for part in parts)
    return Reply("".join(part.content for part in parts), thoughts or None, calls)  # as far as streams tell
