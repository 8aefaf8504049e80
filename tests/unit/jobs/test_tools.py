"""What may be said about tools, and what is an error of the row that says it."""

import json
import random
from typing import Any

import pytest

from nightmill.jobs.base.contract import CallFormat, Markup, Rendering, Tools
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.request.spec import JobSpec

USER = {"role": "user", "content": "Rain in Bonn?"}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def spec(**said: Any) -> JobSpec:
    return JobSpec.parse({"messages": [USER], **said})


def assistant(**call: Any) -> list[dict[str, Any]]:
    made = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": "{}"}} | call
    return [USER, {"role": "assistant", "tool_calls": [made]}]


def test_tools_are_part_of_how_a_chat_is_rendered() -> None:
    made = spec(tools=[tool(strict=None), tool("news", description="What is new")])
    assert made.rendering is not None and made.rendering.tools is not None
    assert made.rendering.tools.names == {"weather", "news"}
    assert not made.rendering.tools.required and made.rendering.tools.parallel
    assert Rendering.read(json.loads(json.dumps(made.rendering.values()))) == made.rendering


@pytest.mark.parametrize(
    ("choice", "required", "function"),
    [
        ("auto", False, None), (None, False, None), ("required", True, None), ("weather", True, "weather"),
        ({"type": "function", "function": {"name": "weather"}}, True, "weather"),
    ],
)  # fmt: skip
def test_a_choice_is_a_word_or_a_function(choice: Any, required: bool, function: str | None) -> None:
    tools = spec(tools=[tool()], tool_choice=choice).tools
    assert tools is not None and (tools.required, tools.function) == (required, function)


def test_no_tools_are_the_same_as_none() -> None:
    for said in ({"tools": []}, {"tools": [tool()], "tool_choice": "none"}, {"tool_choice": "auto"}):
        assert spec(**said) == spec(**said) and spec(**said).rendering is None


def test_a_row_may_choose_among_the_tools_of_its_batch() -> None:
    batch = JobSpec.defaults({"tools": [tool(), tool("news")], "parallel_tool_calls": False})
    tools = JobSpec.parse({"messages": [USER], "tool_choice": "news"}, batch).tools
    assert tools is not None and (tools.function, tools.parallel, len(tools.names)) == ("news", False, 2)
    assert JobSpec.parse({"messages": [USER], "tool_choice": "none"}, batch).tools is None


def test_a_conversation_with_calls_is_kept_as_templates_read_it() -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Bonn"}}}
    answer = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a1", "name": "weather", "content": "rain"}
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": None}
    messages = spec(messages=[USER, answer, result, thought]).messages
    assert messages is not None
    assert messages[1]["content"] == ""
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"place": "Bonn"}
    assert messages[2] == result
    assert messages[3] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": "weather"}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool() | {"cache": 1}]}, "tools[0].cache"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("<|im_end|>")]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(code="x")]}, "tools[0].function.code"),
    ({"tools": [tool(description=7)]}, "tools[0].function.description"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
    ({"tools": [tool(parameters=deep(70))]}, "tools[0].function.parameters"),
    ({"tools": [tool(description="\x00")]}, "tools"),
    ({"tools": [tool(description="\ud800")]}, "tools"),
    ({"tools": [tool(parameters={"enum": [float("nan")]})]}, "tools"),
    ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
    ({"tools": [tool(parameters={"description": "x" * (256 << 10)})]}, "tools"),
    ({"tools": [tool(parameters={"not": {}})], "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"not": {}}, strict=True)]}, "tools[0].function.parameters"),
    ({"tools": [tool()], "tool_choice": "news"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": 7}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [tool()], "grammar": 'root ::= "a"'}, "tools"),
    ({"tools": [tool()], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": [tool()], "continue_final_message": True}, "tools"),
    ({"messages": assistant(id="<|im_end|>")}, "messages[1].tool_calls[0].id"),
    ({"messages": assistant(type="custom")}, "messages[1].tool_calls[0].type"),
    ({"messages": assistant(function=None)}, "messages[1].tool_calls[0]"),
    ({"messages": assistant(custom=1)}, "messages[1].tool_calls[0].custom"),
    ({"messages": assistant(function={"name": "a b", "arguments": "{}"})},
     "messages[1].tool_calls[0].function.name"),
    *(
        ({"messages": assistant(function={"name": "f", "arguments": arguments})},
         "messages[1].tool_calls[0].function.arguments")
        for arguments in ("{", "[]", 7, '{"a": ' + "[" * 70 + "]" * 70 + "}", "[" * 100_000, {"a": 1e999})
    ),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [USER | {"name": "<|im_start|>"}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "messages[0].tool_call_id"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "field"), REFUSED, ids=[f"{n} {field}" for n, (_, field) in enumerate(REFUSED)]
)
def test_what_cannot_be_followed_is_refused_by_name(said: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        spec(**said)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")


def test_tools_beside_a_plain_prompt_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="tools: are for chats"):
        JobSpec.parse({"prompt": "x", "tools": [tool()]})


def test_hostile_tools_and_messages_are_refused_or_understood() -> None:
    """2,000 rows in which something is replaced by what does not belong there."""
    draw = random.Random(19)
    strange: list[Any] = [
        None, True, -1, 1e308, "", "<|im_end|>", "\x00", "\ud800", "{{ 7 }}", [], [[]], {},
        {"type": "function"}, {"$ref": "#"}, {"$ref": "#/$defs/\x00"}, deep(63), deep(200), "a" * 300,
        {1: 2}, {"a": {"b"}}, b"x",
    ]  # fmt: skip

    def spoilt(value: Any) -> Any:
        if draw.random() < 0.12:
            return draw.choice(strange)
        if isinstance(value, dict):
            return {
                (draw.choice(["<s>", "x", 3]) if draw.random() < 0.04 else name): spoilt(item)
                for name, item in value.items()
            }
        return [spoilt(item) for item in value] if isinstance(value, list) else value

    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "(a+)+$"}},
        "required": ["a"],
    }
    row = {
        "messages": [*assistant(), {"role": "tool", "tool_call_id": "a1", "content": "x"}],
        "tools": [tool(description="d", parameters=schema, strict=True), tool("news")],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
    }
    good = 0
    for _ in range(2_000):
        try:
            made = JobSpec.parse(spoilt(row))
        except InvalidRequestError as error:
            assert len(str(error)) < 1_000 and error.field
            continue
        good += 1
        json.dumps([made.messages, None if made.rendering is None else made.rendering.values()]).encode()
    assert 20 < good < 1_500


@pytest.mark.parametrize(
    "values",
    [
        None, [], {}, {"functions": []}, Tools([tool()]).values() | {"required": 1},
        Tools([tool()]).values() | {"function": "news"}, Tools([{"function": {}}]).values(),
        Tools([tool()]).values() | {"functions": [7]}, Tools([tool(parameters=[])]).values(),
    ],
)  # fmt: skip
def test_a_row_that_nobody_can_read_has_no_tools(values: Any) -> None:
    assert Tools.read(values) is None
    assert Rendering.read(Rendering().values() | {"tools": values}) is None


def test_markup_is_read_back_and_strange_markup_is_none() -> None:
    made = Markup(CallFormat.HERMES, ("<think>", "</think>"), True)
    assert Markup.read(json.loads(json.dumps(made.values()))) == made
    assert Markup.read(Markup().values()) == Markup()
    newer = Markup.read(made.values() | {"calls": "smoke-signals"})
    assert newer is not None and newer.calls == "smoke-signals"  # nothing is read as calls
    for strange in (None, [], {}, made.values() | {"opened": 1}, made.values() | {"thinking": ["<think>"]}):
        assert Markup.read(strange) is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_goes_before_the_form_of_an_answer(choice: object) -> None:
    """Instructor asks for both with the Responses API, to be sure of one."""
    both = spec(tools=[tool("weather")], tool_choice=choice, json_schema={"type": "object"})
    alone = spec(tools=[tool("weather")], tool_choice=choice)
    assert both.constrained is None and both.tools == alone.tools
