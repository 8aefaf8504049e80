"""Anthropic's messages, asked for with Anthropic's own client."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.worker.assembly.model import demo_model
from tests.support.servers import wait_until
from tests.unit.server.conftest import ALICE, Server, text_of
from tests.unit.server.scripted_text import SEED, talking_server

if TYPE_CHECKING:  # it takes two seconds to import, in every process that collects tests
    from anthropic import Anthropic
    from anthropic.types import Message

HELLO: Any = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "model", "max_tokens": 60}
SEEDED: dict[str, Any] = {"extra_body": {"seed": 7}}
TOOLS: Any = [
    {"name": name, "description": "It looks.", "input_schema": {"type": "object", "properties": {}}}
    for name in ("weather", "news")
]
TOLD: dict[str, Any] = ASKED | {"tools": TOOLS, "extra_body": {"seed": SEED}}


@pytest.fixture
def talking(sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with talking_server(sqlite_settings, monkeypatch) as server:
        yield server


def client_of(server: Server, key: str = ALICE) -> "Anthropic":
    """The unmodified client, which sends its key as x-api-key."""
    from anthropic import Anthropic

    return Anthropic(base_url=server.url, api_key=key, auth_token=None, max_retries=0)


def job_of(server: Server, message: "Message") -> Any:
    return server.client.get(message.id.removeprefix("msg_"))


def strict(message: "Message") -> None:
    """The answer has what Anthropic's own types want, and each thing of its type."""
    from anthropic.types import Message

    Message.model_validate(message.model_dump(warnings=False), strict=False)


def test_a_message_is_a_job_and_its_answer_the_row_s(server: Server) -> None:
    answer = client_of(server).messages.create(
        model="model",
        max_tokens=50,
        system=[
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "short.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=HELLO,
        stop_sequences=["STOP", "zz"],
        metadata={"user_id": "someone"},
        extra_body={"seed": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3},  # the last versions lack these
    )
    strict(answer)
    job = job_of(server, answer)
    assert job.messages == [{"role": "system", "content": "Be short."}, *HELLO]
    assert (job.owner, job.priority, job.model) == ("alice", INTERACTIVE, "model")
    assert job.params.model_dump(exclude_defaults=True) == {
        "max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ("STOP", "zz"), "seed": 7,
    }  # fmt: skip
    (block,) = answer.content
    assert block.type == "text" and block.text == job.text == text_of(7, max_tokens=50, stop=["STOP", "zz"])
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, job.completion_tokens)


def test_why_it_ends_is_said_in_anthropic_s_words(server: Server) -> None:
    client, text = client_of(server), text_of(7)
    cut = client.messages.create(**ASKED | {"max_tokens": 2}, messages=HELLO, **SEEDED)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    whole = client.messages.create(**ASKED, messages=HELLO, **SEEDED)
    assert whole.stop_reason == "end_turn"
    mark = text[len(text) // 2 :][:3]
    ended = client.messages.create(**ASKED, messages=HELLO, stop_sequences=[mark], **SEEDED)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", mark)
    several = client.messages.create(**ASKED, messages=HELLO, stop_sequences=[mark, "?!"], **SEEDED)
    assert (several.stop_reason, several.stop_sequence) == ("stop_sequence", None)


def test_thoughts_and_calls_come_whole_and_streamed_and_go_back(talking: Server) -> None:
    client = client_of(talking)
    whole = client.messages.create(**TOLD, messages=HELLO)
    strict(whole)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    thoughts, text, *calls = whole.content
    assert (thoughts.thinking, text.text) == ("Is it raining?", "I'll look.")  # type: ignore[union-attr]
    assert [(call.name, call.input) for call in calls] == [  # type: ignore[union-attr]
        ("weather", {"place": "Köln"}), ("news", {}),
    ]  # fmt: skip
    assert whole.stop_reason == "tool_use"

    events = list(client.messages.create(**TOLD, messages=HELLO, stream=True))
    kinds = [event.type for event in events]
    once = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block * 4, "message_delta", "message_stop"]
    with client.messages.stream(**TOLD, messages=HELLO) as stream:
        final = stream.get_final_message()
    strict(final)
    assert [block.model_dump(exclude={"id", "parsed_output"}, warnings=False) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)

    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "wet"},  # type: ignore[union-attr]
        {
            "type": "tool_result", "tool_use_id": calls[1].id, "is_error": True,  # type: ignore[union-attr]
            "content": [{"type": "text", "text": "no "}, {"type": "text", "text": "news"}],
        },
        {"type": "text", "text": "Go on."},
    ]  # fmt: skip
    chat: Any = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": results},
        {"role": "user", "content": "Please."},
    ]
    again = client.messages.create(**TOLD, messages=chat, tool_choice={"type": "none"})
    messages = job_of(talking, again).messages
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert messages[1]["reasoning_content"] == "Is it raining?" and messages[1]["content"] == "I'll look."
    assert [one["function"]["name"] for one in messages[1]["tool_calls"]] == ["weather", "news"]
    assert [one["content"] for one in messages[2:]] == ["wet", "no news", "Go on.\n\nPlease."]
    assert "tool_use" not in {block.type for block in again.content}


def test_tokens_are_counted_as_workers_count_them(start: Callable[..., Any]) -> None:
    with start(tokenizer_files=f"model={demo_model()}", worker=False) as server:
        server.bench.claims.beat(WorkerState.READY, stats={"context": 200, "tool_format": "json"})
        client = client_of(server)
        short = client.messages.count_tokens(model="model", messages=HELLO)
        told = client.messages.count_tokens(model="model", messages=HELLO, system="Be short.", tools=TOOLS)
        chat = {"model": "model", "messages": HELLO}
        with server.http() as http:
            assert short.input_tokens == http.post("/tokenize", json=chat).json()["count"] > 0
            refused = http.post("/v1/messages/count_tokens", json={"messages": []})
        assert told.input_tokens > short.input_tokens + 10
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
        assert server.client.list_jobs() == []


def test_a_stream_begins_with_a_ping_and_names_its_events(server: Server) -> None:
    body = {**ASKED, "messages": HELLO, "stream": True, "seed": 7}
    with server.http(None) as http:
        answer = http.post("/v1/messages", json=body, headers={"x-api-key": ALICE})
    assert answer.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"] and names[-1] == "message_stop"


def test_an_answer_goes_on_with_what_the_model_began(server: Server) -> None:
    chat: Any = [*HELLO, {"role": "assistant", "content": "He"}, {"role": "assistant", "content": "llo"}]
    answer = client_of(server).messages.create(**ASKED, messages=chat, **SEEDED)
    job = job_of(server, answer)
    assert job.rendering is not None and job.rendering.continue_final_message
    assert job.messages[-1] == {"role": "assistant", "content": "He\n\nllo"}


@pytest.mark.parametrize(
    ("choice", "required", "function", "parallel"),
    [
        ({"type": "auto"}, False, None, True),
        ({"type": "any"}, True, None, True),
        ({"type": "tool", "name": "news"}, True, "news", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, None, False),
    ],
)
def test_a_choice_of_tools_reaches_the_job(
    server: Server, choice: Any, required: bool, function: str | None, parallel: bool
) -> None:
    with client_of(server).messages.stream(
        **ASKED, messages=HELLO, tools=TOOLS, tool_choice=choice, **SEEDED
    ) as stream:
        message = next(event.message for event in stream if event.type == "message_start")
        tools = job_of(server, message).rendering.tools
    assert (tools.required, tools.function, tools.parallel) == (required, function, parallel)
    assert tools.functions[0]["function"]["description"] == "It looks."


@pytest.mark.parametrize(
    ("more", "variables"),
    [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking": True},
        ),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
        ),
    ],
)
def test_thinking_is_what_templates_look_at(
    server: Server, more: dict[str, Any], variables: dict[str, Any]
) -> None:
    answer = client_of(server).messages.create(**ASKED, messages=HELLO, **SEEDED, **more)
    assert dict(job_of(server, answer).rendering.variables) == variables


def test_errors_have_anthropic_s_shape(start: Callable[..., Any]) -> None:
    import anthropic

    with start(worker=False) as server:
        with pytest.raises(anthropic.AuthenticationError, match="not known here"):
            client_of(server, "a key that is not known").messages.create(**ASKED, messages=HELLO)
        with pytest.raises(anthropic.BadRequestError) as bad:
            client_of(server).messages.create(**ASKED, messages=HELLO, extra_body={"temperature": -1})
        body: Any = bad.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["param"] == "temperature"
        with pytest.raises(anthropic.NotFoundError) as away:
            client_of(server).messages.create(**ASKED | {"model": "other"}, messages=HELLO)
        other: Any = away.value.body
        assert (other["error"]["type"], other["error"]["param"]) == ("not_found_error", "model")
        with server.http(None) as http:
            missing = http.post("/v1/messages", json={})
            assert (missing.status_code, missing.json()["error"]["type"]) == (401, "authentication_error")
            assert http.get("/v1/messages").json()["type"] == "error"
            assert http.delete("/v1/messages").json()["error"]["code"] == "unknown_url"


def test_a_full_server_says_so_in_anthropic_s_shape(start: Callable[..., Any]) -> None:
    import anthropic

    with (
        start(worker=False, limits=ServerLimits(requests=0)) as server,
        pytest.raises(anthropic.RateLimitError) as full,
    ):
        client_of(server).messages.create(**ASKED, messages=HELLO)
    body: Any = full.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")


def test_what_is_refused_is_the_status_of_a_stream(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic

    def refuse(*_: Any) -> Any:
        raise ValueError("this prompt cannot be computed")

    monkeypatch.setattr(server.bench.prompting, "markup", refuse)
    for stream in (False, True):
        with pytest.raises(anthropic.APIStatusError) as error:
            client_of(server).messages.create(**ASKED, messages=HELLO, stream=stream)
        body: Any = error.value.body
        assert (body["type"], body["error"]["code"]) == ("error", "generation_failed")


def test_what_goes_wrong_later_is_the_last_event(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any) -> Any:
        raise DatabaseUnreachableError

    server.bench.runner.pause_at = len(server.bench.runner.batches) + 8  # type: ignore[attr-defined]
    with (
        server.http() as http,
        http.stream(
            "POST", "/v1/messages", json={**ASKED, "messages": HELLO, "stream": True, "ignore_eos": True}
        ) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        monkeypatch.setattr(server.client, "get", away)
        server.bench.runner.pause_at = 1 << 30  # type: ignore[attr-defined]
        rest = list(lines)
    events = [line for line in rest if line.startswith("event: ")]
    assert events[-1] == "event: error" and '"type": "overloaded_error"' in rest[-2]


def test_who_leaves_a_stream_cancels_its_job(server: Server) -> None:
    server.bench.runner.pause_at = len(server.bench.runner.batches) + 8  # type: ignore[attr-defined]
    with (
        httpx2.Client(timeout=30) as http,
        http.stream(
            "POST",
            f"{server.url}/v1/messages",
            json={**ASKED, "messages": HELLO, "stream": True, "ignore_eos": True},
            headers={"x-api-key": ALICE},
        ) as answer,
    ):
        next(answer.iter_lines())
        (job,) = server.client.list_jobs()
    wait_until(lambda: server.client.get(job.id).cancel_requested_at is not None)
    server.bench.runner.pause_at = 1 << 30  # type: ignore[attr-defined]
    wait_until(lambda: server.client.get(job.id).state.final)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
CALL = {"type": "tool_use", "id": "c", "name": "news", "input": {}}


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": role, "content": list(blocks)}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
    (said("user", IMAGE), "messages[1].content[0].type"),
    (said("user", {"type": "document"}), "messages[1].content[0].type"),
    (said("user", CALL), "messages[1].content[0].type"),
    (said("user", {"type": "text", "text": 5}), "messages[1].content[0].text"),
    (said("user", {"type": "tool_result", "content": "a"}), "messages[1].content[0].tool_use_id"),
    (
        said("user", {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}),
        "messages[1].content[0].content[0].type",
    ),
    (
        said("user", {"type": "tool_result", "tool_use_id": "a b", "content": "a"}),
        "messages[1].content[0].tool_use_id",
    ),
    (said("assistant", {"type": "text", "text": "a"}, CALL | {"name": "a b"}), "messages[1].content[1].name"),
    (said("assistant", CALL | {"id": None}), "messages[1].content[0].id"),
    (said("assistant", CALL | {"input": []}), "messages[1].content[0].input"),
    ({"tools": TOOLS} | said("assistant", {"type": "text", "text": "a"}), "messages"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"system": 5}, "system"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "sing"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sing"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"context_management": {"edits": [{"type": "x"}]}}, "context_management"),
    ({"stream": "yes"}, "stream"),
    ({"n": 2}, "n"),
    ({"unknown": 1}, "unknown"),
]


def test_what_has_no_meaning_here_is_refused_by_name(start: Callable[..., Any]) -> None:
    with start(worker=False) as server, server.http() as http:
        for body, param in REFUSED:
            answer = http.post("/v1/messages", json={**ASKED, "messages": HELLO} | body)
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param and error["message"].startswith(f"{param}: "), (body, error)
        assert server.client.list_jobs() == []


@pytest.mark.parametrize(
    "shape", [lambda form: {"output_config": {"format": form}}, lambda form: {"output_format": form}]
)
def test_a_schema_of_the_answer_reaches_the_job(server: Server, shape: Callable[[Any], Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = shape({"type": "json_schema", "schema": schema})
    with server.http() as http:
        http.post("/v1/messages", json={**ASKED, "messages": HELLO, **form})  # no grammars in this worker
    (job,) = server.client.list_jobs()
    assert job.constrained is not None and '"integer"' in job.constrained.text
