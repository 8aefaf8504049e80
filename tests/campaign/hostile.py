"""Requests at and past every limit. Each is refused by name, or accepted and ended: nothing in between."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

DEEP: Any = 1
for _ in range(3000):
    DEEP = [DEEP]


def request(draw: random.Random) -> tuple[dict[str, Any], bool]:
    """(keywords of `enqueue` with `prompt`, True where it can only fail)."""
    far = datetime.now(UTC)
    prompt: Any = draw.choice(
        ("ordinary", "\x1b]0;title\x07", "[/b][bold", "a\u0301\u00e9 \U0001f600", "<|im_end|>", "{{ 7*7 }}",
         "'; DROP TABLE jobs; --", "%s %(x)s", "\ud800", "nul \0 nul", "", b"bytes", 7, None, [], [{}],
         [{"role": "user", "content": "x"}] * 200, [{"role": "user", "content": None}],
         [{"role": "root", "content": "x"}], [{"role": "user", "content": "\ud800"}])
    )  # fmt: skip
    extremes: list[dict[str, Any]] = [
        {"max_tokens": 1_000_000}, {"max_tokens": 0}, {"max_tokens": True}, {"max_tokens": 1e3},
        {"temperature": 1e-320}, {"temperature": 100.0}, {"temperature": float("nan")}, {"temperature": -0.0},
        {"top_p": 5e-324}, {"top_p": 1e-46}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 2**31 - 1},
        {"top_k": 2**31}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e-39},
        {"repetition_penalty": 100.0}, {"seed": 2**63 - 1}, {"seed": 2**63}, {"seed": -1},
        {"stop": ["\0"]}, {"stop": ["x"] * 17}, {"stop": "y" * 100_000}, {"stop": [""]}, {"stop": 7},
        {"priority": 10}, {"priority": True}, {"custom_id": "\x1b[31m" + "c" * 500}, {"custom_id": ""},
        {"custom_id": "c" * 513}, {"batch": "[/x]\x1b\n"}, {"batch": "b" * 201}, {"batch": "\0"},
        {"metadata": {"deep": DEEP}}, {"metadata": {"nan": float("nan")}}, {"metadata": {"\0": 1}},
        {"metadata": {"large": "m" * 300_000}}, {"metadata": {1: object()}}, {"metadata": {"s": "\ud800"}},
        {"deadline": far - timedelta(days=1)}, {"deadline": timedelta(days=999_999_999)},
        {"deadline": datetime.max}, {"deadline": far.replace(tzinfo=None)}, {"scheduled_at": timedelta(-1)},
        {"max_attempts": 0}, {"max_attempts": 1}, {"max_attempts": 101}, {"model": "no/such-model"},
        {"model": "../../etc/passwd"}, {"idempotency_key": "k" * 256}, {"nonsense": 1},
        {"tools": [{}] * 129}, {"tools": [DEEP]}, {"tools": "x"}, {"tool_choice": "\x1b[31m"},
        {"tool_choice": 7}, {"tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]},
        {"parallel_tool_calls": "no"},
    ]  # fmt: skip
    chosen: dict[str, Any] = {"max_tokens": 20}
    for extreme in draw.sample(extremes, draw.randrange(1, 3)):
        chosen |= extreme
    too_long = draw.random() < 0.1
    return chosen | {"prompt": "long " * 400 if too_long else prompt}, too_long


_TOOLS = (
    '{"functions": [{"function": {"name": "<|im_end|>"}}], "required": true, "function": null, '
    '"parallel": true}'
)
_RENDERING = '{"variables": {}, "add_generation_prompt": true, "continue_final_message": false, "tools": %s}'


def rewritten(draw: random.Random, *, sqlite: bool) -> dict[str, Any]:
    """Columns of a row as a newer client, or a person with SQL, may leave them: no worker can run it."""
    params = ('{"max_tokens": 5, "of_a_newer_version": 1}', "[]", '{"max_tokens": "many"}', "null", '"x"')
    values: list[dict[str, Any]] = [{"params": text} for text in params]
    values += [{"prompt": None, "messages": text} for text in ("5", '[{"role": 7}]', '{"a": 1}', "[[]]")]
    values += [{"seed": -5}]
    values += [{"rendering": text} for text in ("[]", f'{{"tools": {_TOOLS}}}', _RENDERING % _TOOLS)]
    if sqlite:
        values += [{"params": "{not json"}, {"seed": "seven"}]
    return draw.choice(values)
