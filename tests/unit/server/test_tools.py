"""Calls of tools and thoughts, as OpenAI's own client reads them: whole, and streamed."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.printing import print_all_of
from tests.unit.engine import by_definition
from tests.unit.server.browser import Browser
from tests.unit.server.conftest import ALICE, Server
from tests.unit.server.scripted_text import SEED, TEXT, talking_server

TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("weather", "news")]
HELLO: Any = [{"role": "user", "content": "Rain in Köln?"}]
ASKED: dict[str, Any] = {"model": "model", "messages": HELLO, "seed": SEED, "max_tokens": 40}


@pytest.fixture
def talking(sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server whose worker answers TEXT to everything, in pieces of six bytes or so."""
    with talking_server(sqlite_settings, monkeypatch) as server:
        yield server


def test_calls_and_thoughts_come_whole_and_streamed_and_go_back(talking: Server) -> None:
    client = talking.openai()
    whole = client.chat.completions.create(**ASKED, tools=TOOLS)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I'll look."
    assert choice.message.reasoning_content == "Is it raining?"  # type: ignore[attr-defined]
    calls = choice.message.tool_calls or []
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "weather", {"place": "Köln"}),
        ("function", "news", {}),
    ]
    assert len({call.id for call in calls}) == 2
    job = talking.client.get(whole.id.removeprefix("chatcmpl-"))
    size = -(-len(TEXT.encode()) // by_definition.EOS)
    thoughts_end = len(TEXT.partition("</think>")[0].encode()) + len("</think>")
    assert job.reasoning_tokens == -(-thoughts_end // size)
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == job.reasoning_tokens
    page = Browser(talking, ALICE).get("/job", id=job.id).text
    assert "<summary>Thoughts</summary><pre>Is it raining?</pre>" in page
    assert f"<dt>Of these thoughts</dt><dd>{job.reasoning_tokens}</dd>" in page
    with CliRunner().isolation() as (shown, *_):
        print_all_of(job)
    *_, said = shown.getvalue().decode().partition("\nthoughts\n")
    assert said.startswith("Is it raining?\nanswer\nI'll look.\n") and "call weather" in said
    assert "&lt;think&gt;" not in page and "I&#39;ll look." in page and "weather {" in page
    assert job.text == TEXT and [call.id for call in job.tool_calls] == [call.id for call in calls]

    with client.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
        thoughts = [
            event.chunk.choices[0].delta.reasoning_content  # type: ignore[attr-defined]
            for event in stream
            if event.type == "chunk" and hasattr(event.chunk.choices[0].delta, "reasoning_content")
        ]
        final = stream.get_final_completion().choices[0]
    assert "".join(thoughts) == "Is it raining?"
    assert (final.finish_reason, final.message.content) == ("tool_calls", "I'll look.")
    streamed = final.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in streamed] == [
        (call.function.name, call.function.arguments) for call in calls
    ]

    results = [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in calls]
    chat = [*HELLO, choice.message.model_dump(), *results]
    again = client.chat.completions.create(**ASKED | {"messages": chat}, tools=TOOLS, tool_choice="none")
    messages = talking.client.get(again.id.removeprefix("chatcmpl-")).messages
    assert messages is not None and messages[1]["reasoning_content"] == "Is it raining?"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"place": "Köln"}'}
    assert messages[2] == {"role": "tool", "tool_call_id": calls[0].id, "content": "wet"}
    message = again.choices[0].message
    assert message.tool_calls is None and "<tool_call>" in (message.content or "")


def test_what_cannot_be_called_is_refused_by_name(start: Callable[..., Any]) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": "sing"}, "tool_choice"),
        ({"tools": TOOLS, "extra_body": {"grammar": 'root ::= "a"'}}, "tools"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
    ]
    with start(worker=False) as server:
        for more, param in refused:
            with pytest.raises(openai.BadRequestError) as error:
                server.openai().chat.completions.create(**ASKED | more)
            assert error.value.param == param
