"""OpenAI's responses, asked for with OpenAI's own client."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.request.fields import INTERACTIVE
from tests.support.servers import wait_until
from tests.unit.server.conftest import BOB, OPS, Server, text_of
from tests.unit.server.scripted_text import SEED, talking_server

SEEDED: dict[str, Any] = {"extra_body": {"seed": 7}}
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
    for name in ("weather", "news")
]


@pytest.fixture
def talking(sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with talking_server(sqlite_settings, monkeypatch) as server:
        yield server


def job_id(response: Response) -> str:
    return response.id.removeprefix("resp_")


def strict(response: Response) -> None:
    """The answer has what OpenAI's own types want, and each thing of its type."""
    Response.model_validate(response.model_dump(warnings=False), strict=False)


def test_a_text_is_answered_and_kept(server: Server) -> None:
    client = server.openai()
    answer = client.responses.create(
        model="model",
        input="Hello",
        instructions="Be short.",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        metadata={"tale": "2"},
        user="someone",
        **SEEDED,
    )
    strict(answer)
    job = server.client.get(job_id(answer))
    assert job.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello"},
    ]
    assert (job.owner, job.priority, job.model, job.metadata) == (
        "alice", INTERACTIVE, "model", {"tale": "2"},
    )  # fmt: skip
    assert job.params.model_dump(exclude_defaults=True) == {
        "max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "seed": 7,
    }  # fmt: skip
    assert answer.output_text == job.text == text_of(7, max_tokens=50)
    assert (answer.status, answer.instructions, answer.metadata) == ("completed", "Be short.", {"tale": "2"})
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, job.completion_tokens)
    assert client.responses.retrieve(answer.id) == answer


def test_an_answer_that_was_cut_is_incomplete(server: Server) -> None:
    answer = server.openai().responses.create(model="model", input="Hello", max_output_tokens=2, **SEEDED)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"  # type: ignore[union-attr]


def test_a_stream_has_its_events_in_order_and_ends_with_what_is_kept(talking: Server) -> None:
    client = talking.openai()
    events = list(
        client.responses.create(
            model="model",
            input="Rain in Köln?",
            tools=TOOLS,
            stream=True,
            max_output_tokens=60,
            extra_body={"seed": SEED},
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    once = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert once == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *call,
        *call,
        "response.completed",
    ]
    last: Any = events[-1]
    strict(last.response)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    assert [item.type for item in done] == ["reasoning", "message", "function_call", "function_call"]
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta  # type: ignore[union-attr]
    assert list(deltas.values()) == ["Is it raining?", "I'll look.", '{"place": "Köln"}', "{}"]
    assert list(deltas) == [item.id for item in done]
    kept = client.responses.retrieve(last.response.id)
    assert kept == last.response
    again = list(client.responses.retrieve(kept.id, stream=True))
    assert again[-1].response == kept  # type: ignore[union-attr]


def test_the_client_s_own_helper_reads_the_stream(talking: Server) -> None:
    with talking.openai().responses.stream(
        model="model", input="Rain?", tools=TOOLS, max_output_tokens=60, extra_body={"seed": SEED}
    ) as stream:
        final = stream.get_final_response()
    assert final.output_text == "I'll look."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"place": "Köln"}), ("news", {}),
    ]  # fmt: skip


def test_a_conversation_goes_on_from_its_rows(talking: Server) -> None:
    client = talking.openai()
    asked: dict[str, Any] = {"model": "model", "max_output_tokens": 60, "extra_body": {"seed": SEED}}
    first = client.responses.create(input="Rain in Köln?", instructions="Call tools.", tools=TOOLS, **asked)
    calls = [item for item in first.output if item.type == "function_call"]
    second = client.responses.create(
        previous_response_id=first.id,
        instructions="Be kind.",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "wet"} for call in calls],
        **asked,
    )
    assert second.previous_response_id == first.id
    messages = talking.client.get(job_id(second)).messages or []
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool"]
    assert messages[0]["content"] == "Be kind."
    assert messages[2]["reasoning_content"] == "Is it raining?" and messages[2]["content"] == "I'll look."
    assert [one["function"]["name"] for one in messages[2]["tool_calls"]] == ["weather", "news"]
    assert [one["tool_call_id"] for one in messages[3:]] == [call.call_id for call in calls]

    # The same conversation, brought by the caller, is the same prompt.
    brought = client.responses.create(
        instructions="Be kind.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Rain in Köln?"}]},
            *[item.model_dump() for item in first.output],  # type: ignore[misc, list-item]
            *[{"type": "function_call_output", "call_id": call.call_id, "output": "wet"} for call in calls],
        ],
        store=False,
        **asked,
    )
    assert talking.client.get(job_id(brought)).messages == messages

    # The first may go: the second's row has the conversation.
    client.responses.delete(first.id)
    third = client.responses.create(previous_response_id=second.id, input="And now?", **asked)
    roles = [one["role"] for one in talking.client.get(job_id(third)).messages or []]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]

    items = client.responses.input_items.list(third.id, order="asc", limit=3)
    listed = list(items)  # page by page
    assert [item.type for item in listed] == [
        "message", "reasoning", "message", "function_call", "function_call", "function_call_output",
        "function_call_output", "reasoning", "message", "message",
    ]  # fmt: skip
    assert len({item.id for item in listed}) == len(listed)
    newest = client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].id == listed[-1].id and newest.has_more


def test_others_responses_and_those_that_are_not_kept_are_not_there(server: Server) -> None:
    mine = server.openai().responses.create(model="model", input="Hello", **SEEDED)
    unkept = server.openai().responses.create(model="model", input="Hello", store=False, **SEEDED)
    chat = server.openai().completions.create(model="model", prompt="Hello", max_tokens=2)
    bob = server.openai(BOB)
    for client, named in (
        (bob, mine.id),
        (server.openai(), unkept.id),
        (server.openai(), f"resp_{chat.id.removeprefix('cmpl-')}"),
        (server.openai(), "resp_x"),
        (server.openai(), job_id(mine)),
    ):
        for ask in (
            client.responses.retrieve,
            client.responses.delete,
            client.responses.cancel,
            client.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError) as error:
                ask(named)
            assert error.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError) as error:
            client.responses.create(model="model", input="And?", previous_response_id=named)
        assert error.value.param == "previous_response_id"
    assert server.openai(OPS).responses.retrieve(mine.id) == mine


def test_in_the_background_nobody_waits(server: Server, start: Callable[..., Any]) -> None:
    client = server.openai()
    server.bench.runner.pause_at = 0  # type: ignore[attr-defined]
    begun = client.responses.create(model="model", input="Hello", background=True, **SEEDED)
    assert begun.status in ("queued", "in_progress") and begun.background and begun.output == []
    assert server.client.get(job_id(begun)).priority < INTERACTIVE
    for refused, said in (
        (lambda: client.responses.delete(begun.id), "has not ended"),
        (
            lambda: client.responses.create(model="model", input="And?", previous_response_id=begun.id),
            "has not ended",
        ),
    ):
        with pytest.raises(openai.APIStatusError, match=said):
            refused()
    server.bench.runner.pause_at = 1 << 30  # type: ignore[attr-defined]
    wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
    assert client.responses.retrieve(begun.id).output_text == text_of(7)
    assert client.responses.cancel(begun.id).status == "completed"


def test_it_can_be_cancelled_and_deleted(start: Callable[..., Any]) -> None:
    with start(worker=False) as server:
        client = server.openai()
        begun = client.responses.create(input="Hello", background=True, **SEEDED)
        assert begun.status == "queued"
        assert client.responses.cancel(begun.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="no text to go on from"):
            client.responses.create(input="And?", previous_response_id=begun.id)
        client.responses.delete(begun.id)
        assert server.client.list_jobs() == []
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun.id)


def test_what_is_refused_is_the_status_and_what_is_kept_of_it_has_failed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("this prompt cannot be computed")

    monkeypatch.setattr(server.bench.prompting, "markup", refuse)
    client = server.openai()
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.APIStatusError) as error:
            list(client.responses.create(model="model", input="Hello", **more))  # type: ignore[call-overload]
        assert error.value.code == "generation_failed"
    events: list[Any] = list(
        client.responses.create(model="model", input="Hello", stream=True, background=True)
    )
    assert [event.type for event in events][:3] == [
        "response.created", "response.queued", "response.in_progress",
    ]  # fmt: skip
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code in ("invalid_prompt", "server_error")
    strict(last.response)
    assert client.responses.retrieve(last.response.id).status == "failed"
    assert next(iter(client.responses.retrieve(last.response.id, stream=True))).type == "response.created"


def test_log_probabilities_come_with_the_text(server: Server) -> None:
    client = server.openai()
    asked: dict[str, Any] = {
        "model": "model", "input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        "max_output_tokens": 5,
    }  # fmt: skip
    whole = client.responses.create(**asked, **SEEDED)
    events: list[Any] = list(client.responses.create(**asked, **SEEDED, stream=True))
    text: Any = whole.output[0]
    told = server.client.get(job_id(whole)).logprobs or ()
    assert [one.token for one in text.content[0].logprobs] == [one.token for one in told]
    assert events[-1].response.output[0].content[0].logprobs == text.content[0].logprobs
    deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in deltas] == [one.token for one in told][: len(deltas)] and deltas


def test_rows_of_files_are_responses_too(server: Server) -> None:
    client = server.openai()
    body = {"model": "model", "input": "Hello", "seed": 7, "max_output_tokens": 9}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body},
        {"custom_id": "b", "method": "POST", "url": "/v1/responses", "body": body | {"background": True}},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
        {
            "custom_id": "d", "method": "POST", "url": "/v1/responses",
            "body": body | {"previous_response_id": "resp_x"},
        },
    ]  # fmt: skip
    rows = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("rows.jsonl", rows), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="1h")
    ended = wait_until(
        lambda: (one := client.batches.retrieve(batch.id)).status == "completed" and one, timeout=240
    )
    (row,) = map(json.loads, client.files.content(ended.output_file_id).text.splitlines())
    response = Response.model_validate(row["response"]["body"])
    assert row["custom_id"] == "a" and response.output_text == text_of(7, max_tokens=9)
    errors = {
        one["custom_id"]: one["error"]["field"]
        for one in map(json.loads, client.files.content(ended.error_file_id).text.splitlines())
    }
    assert errors == {"b": "body.background", "c": "url", "d": "body.previous_response_id"}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
