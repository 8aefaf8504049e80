"""What a request of OpenAI's responses may say: how it reaches the job, and what is refused by its name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from nightmill.jobs.base.contract import Constrained, ConstraintKind

TOOLS: Any = [{"type": "function", "name": name} for name in ("weather", "news")]


def test_the_form_of_the_answer_reaches_the_job(start: Callable[..., Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    closed = json.dumps(schema | {"additionalProperties": False}, separators=(",", ":"))
    forms: list[tuple[dict[str, Any], Constrained | None]] = [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constrained(ConstraintKind.JSON_SCHEMA, '{"type":"object"}')),
        (
            {"type": "json_schema", "name": "it", "strict": True, "schema": schema},
            Constrained(ConstraintKind.JSON_SCHEMA, closed),
        ),
    ]
    with start(worker=False) as server:
        for form, expected in forms:
            answer = server.openai().responses.create(
                input="Hello",
                text={"format": form},
                background=True,  # type: ignore[typeddict-item]
            )
            assert server.client.get(answer.id.removeprefix("resp_")).constrained == expected
            assert answer.text is not None and answer.text.format is not None
            assert answer.text.format.type == form["type"]


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        (None, None),
        ("none", {"enable_thinking": False, "thinking": False}),
        ("minimal", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_effort_is_what_templates_look_at(
    start: Callable[..., Any], effort: Any, variables: dict[str, Any] | None
) -> None:
    with start(worker=False) as server:
        answer = server.openai().responses.create(
            input="Hello", background=True, reasoning={"effort": effort, "summary": "auto"}
        )
        rendering = server.client.get(answer.id.removeprefix("resp_")).rendering
        assert (None if rendering is None else dict(rendering.variables)) == variables
        assert answer.reasoning is not None and answer.reasoning.effort == effort


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": None}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [IMAGE]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "a\0"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "a", "weight": 1}]}, "input[0].weight"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
    (
        {"input": [*[{"role": "user", "content": "a"}] * 2, CALL | {"name": "a b"}]},
        "input[2].name",
    ),
    (
        {"input": [{"role": "assistant", "content": "a"}, CALL | {"arguments": "{"}]},
        "input[1].arguments",
    ),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "n"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": "sing"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sing"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"include": "x"}, "include"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"store": "yes"}, "store"),
    ({"background": True, "store": False}, "background"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"unknown": 1}, "unknown"),
]  # fmt: skip


def test_what_has_no_meaning_here_is_refused_by_name(start: Callable[..., Any]) -> None:
    with start(worker=False) as server, server.http() as http:
        for body, param in REFUSED:
            answer = http.post("/v1/responses", json={"input": "Hello"} | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (body, error)
            assert error["message"].startswith(f"{param}: "), error
        assert server.client.list_jobs() == []
        for query, param in ((b"starting_after=3", "starting_after"), (b"include=x", "include")):
            answer = http.get(f"/v1/responses/resp_x?{query.decode()}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
