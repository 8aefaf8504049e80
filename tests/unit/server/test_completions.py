"""OpenAI's completions, asked for with OpenAI's own client."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from nightmill.jobs.base.arithmetic import system_fingerprint
from nightmill.jobs.base.contract import Constrained, ConstraintKind, JobState
from nightmill.jobs.formats.openai import IGNORED, NEUTRAL
from nightmill.jobs.reply.answers import answer_seed
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.server.job_service import ServerLimits
from tests.support.servers import wait_until
from tests.unit.engine.scripted import ARITHMETIC
from tests.unit.server.conftest import BOB, Server, text_of

MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "model", "messages": MESSAGES}
PLAIN: dict[str, Any] = {"model": "model", "prompt": "Once"}


def test_a_chat_is_a_job_and_its_answer_the_rows(server: Server) -> None:
    answer = server.openai().chat.completions.create(
        **CHAT,
        seed=7,
        max_completion_tokens=50,
        temperature=0.5,
        top_p=0.9,
        stop=["STOP", "zz"],
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True},
    )
    job = server.client.get(answer.id.removeprefix("chatcmpl-"))
    text = text_of(7, max_tokens=50, stop=["STOP", "zz"], ignore_eos=True)
    assert answer.choices[0].message.content == job.text == text
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == (
        "chat.completion",
        "model",
        "length" if job.completion_tokens == 50 else "stop",
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == job.completion_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    params = job.params.model_dump(exclude_defaults=True)
    assert params == {
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ("STOP", "zz"),
        "seed": 7,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
    }
    assert (job.messages, job.owner, job.priority, job.model) == (MESSAGES, "alice", INTERACTIVE, "model")


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_gives_the_same_text_and_reason_as_the_whole(server: Server, seed: int) -> None:
    client = server.openai()
    limit: dict[str, Any] = {"seed": seed, "max_tokens": 40}
    whole = client.chat.completions.create(**CHAT, **limit)
    chunks = list(
        client.chat.completions.create(**CHAT, **limit, stream=True, stream_options={"include_usage": True})
    )
    *told, end, last = chunks
    assert told[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == whole.choices[0].message.content
    assert {chunk.choices[0].finish_reason for chunk in told} == {None}
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert len({(chunk.id, chunk.model, chunk.created, chunk.object) for chunk in chunks}) == 1
    fingerprint = system_fingerprint(str(ARITHMETIC))
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint} == {fingerprint}
    plain = list(client.chat.completions.create(**CHAT, **limit, stream=True))
    assert len([chunk for chunk in plain if not chunk.choices]) == 0


def test_plain_completions_whole_and_streamed(server: Server) -> None:
    client = server.openai()
    whole = client.completions.create(**PLAIN, seed=3, max_tokens=30)
    chunks = list(client.completions.create(**PLAIN, seed=3, max_tokens=30, stream=True))
    assert whole.object == chunks[0].object == "text_completion"
    assert whole.choices[0].text == text_of(3, max_tokens=30)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert server.client.get(whole.id.removeprefix("cmpl-")).prompt == "Once"


def test_several_answers_are_choices_whole_and_streamed(server: Server) -> None:
    client = server.openai()
    limit: dict[str, Any] = {"seed": 3, "max_tokens": 30, "n": 4}
    texts = [text_of(answer_seed(3, number), max_tokens=30) for number in range(4)]
    plain = client.completions.create(**PLAIN, **limit)
    chat = client.chat.completions.create(**CHAT, **limit)
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in plain.choices] == texts
    assert [choice.message.content for choice in chat.choices] == texts
    job = server.client.get(plain.id.removeprefix("cmpl-"))
    assert plain.usage is not None and (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (
        3,
        sum(answer.completion_tokens for answer in job.answers),
    )
    told = list(
        client.chat.completions.create(**CHAT, **limit, stream=True, stream_options={"include_usage": True})
    )
    joined, ends = [""] * 4, {}
    for chunk in told:
        for choice in chunk.choices:
            joined[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert joined == texts
    assert ends == {choice.index: choice.finish_reason for choice in chat.choices}
    assert told[-1].usage == chat.usage
    streamed = [""] * 4
    for piece in client.completions.create(**PLAIN, **limit, stream=True):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == texts
    with server.http() as http:
        own = http.post("/v1/generate", json={"prompt": "Once"} | limit).json()
    assert [answer["text"] for answer in own["answers"]] == texts and own["text"] == texts[0]


def test_a_hundred_at_once_with_the_asynchronous_client(server: Server) -> None:
    async def program() -> list[str]:
        async with server.openai_async(timeout=240) as client:

            async def ask(seed: int) -> str:
                if seed % 2:
                    answer = await client.chat.completions.create(**CHAT, seed=seed, max_tokens=20)
                    return answer.choices[0].message.content or ""
                stream = await client.chat.completions.create(**CHAT, seed=seed, max_tokens=20, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(ask, range(100)))

    assert asyncio.run(program()) == [text_of(seed, max_tokens=20) for seed in range(100)]


def test_raw_responses_and_helpers_of_the_client(server: Server) -> None:
    raw = server.openai().chat.completions.with_raw_response.create(**CHAT, seed=1, max_tokens=9)
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    assert raw.parse().id == f"chatcmpl-{raw.headers['x-request-id']}"
    with server.openai().chat.completions.stream(**CHAT, seed=1, max_tokens=9) as stream:
        assert stream.get_final_completion().choices[0].message.content == text_of(1, max_tokens=9)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"max_tokns": 3}, "max_tokns"),
        ({"custom_id": "x"}, "custom_id"),
        ({"owner": "bob"}, "owner"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format",
        ),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    server: Server, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().post("/chat/completions", body=CHAT | more, cast_to=object)
    error: Any = caught.value.body
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert str(error["message"]).startswith(error["param"])
    assert server.client.list_jobs() == []


def test_what_files_take_and_ignore_is_taken_and_ignored_here(server: Server) -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values and name != "suffix"}
    ignored = dict.fromkeys(IGNORED - {"stream_options", "service_tier"}, "x") | {"service_tier": "auto"}
    answer: Any = server.openai().post(
        "/chat/completions", body=CHAT | {"max_tokens": 3, "user": None} | neutral | ignored, cast_to=object
    )
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_what_the_answer_must_be_reaches_the_job(server: Server) -> None:
    """As OpenAI's client says it for a model of pydantic. The worker of these tests can compile none."""

    class Person(BaseModel):
        name: str

    with pytest.raises(openai.APIError, match="json_schema: this engine compiles none"):
        server.openai().chat.completions.parse(**CHAT, response_format=Person)
    with pytest.raises(openai.APIError, match="choice: this engine compiles none"):
        server.openai().chat.completions.create(**CHAT, extra_body={"choice": ["yes", "no"]})
    choice, person = (job.constrained for job in server.client.list_jobs())
    assert choice == Constrained(ConstraintKind.CHOICE, '["yes","no"]')
    assert person is not None and json.loads(person.text)["required"] == ["name"]


def test_a_prompt_that_the_worker_refuses_is_a_bad_request(server: Server) -> None:
    client = server.openai()
    with pytest.raises(openai.BadRequestError, match="the template refuses"):
        client.completions.create(model="model", prompt="unspeakable")


@pytest.mark.parametrize("n", [1, 3])
def test_the_status_of_a_stream_is_that_of_its_answer(server: Server, n: int) -> None:
    asked: dict[str, Any] = PLAIN | {"prompt": "unspeakable", "n": n}
    with server.http() as http:
        whole = http.post("/v1/completions", json=asked)
        with http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
            assert answer.headers["content-type"] == "application/json"
            streamed = json.loads(answer.read())
    assert (answer.status_code, streamed) == (whole.status_code, whole.json())
    assert whole.status_code == 400 and streamed["error"]["message"] == "the template refuses"


def test_a_stream_that_has_to_wait_begins_with_comments_and_then_says_what_went_wrong(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightmill.jobs.server.events.PAUSE_SECONDS", 0.02)
    with start(limits=ServerLimits(request_seconds=1.0, grace_seconds=0)) as server:
        server.bench.runner.pause_at = 0
        with server.http() as http:
            answer = http.post("/v1/completions", json=PLAIN | {"stream": True})
        server.bench.runner.pause_at = 1 << 30
    *comments, error, rest = answer.text.split("\n\n")
    assert (answer.status_code, rest) == (200, "")
    assert set(comments) == {": still there"} and len(comments) > 3
    assert json.loads(error.removeprefix("data: "))["error"]["code"] in ("deadline", "timeout")


def test_a_stream_that_ends_before_its_first_piece_has_the_status_of_the_end(
    start: Callable[..., Any],
) -> None:
    with (
        start(limits=ServerLimits(request_seconds=0.5, grace_seconds=0), worker=False) as server,
        server.http() as http,
    ):
        answer = http.post("/v1/completions", json=PLAIN | {"stream": True})
    assert answer.status_code == 504


def test_an_answer_that_is_late_says_so(start: Callable[..., Any]) -> None:
    with start(limits=ServerLimits(request_seconds=0.5)) as server:
        server.bench.runner.seconds = 0.05
        long: dict[str, Any] = {"seed": 1, "max_tokens": 150, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.InternalServerError, match="not complete in time") as caught:
            server.openai().chat.completions.create(**CHAT, **long)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match="not complete in time"):
            list(server.openai().chat.completions.create(**CHAT, **long, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_has_the_job_cancelled(server: Server, stream: bool) -> None:
    server.bench.runner.seconds = 0.05  # type: ignore[attr-defined]
    asked: dict[str, Any] = CHAT | {"max_tokens": 190}
    if stream:
        answer = server.openai().chat.completions.create(
            **asked, extra_body={"ignore_eos": True}, stream=True
        )
        next(iter(answer))
        answer.close()
    else:
        server.left("/v1/chat/completions", asked | {"ignore_eos": True})
    (job,) = server.client.list_jobs()
    wait_until(lambda: server.client.get(job.id).cancel_requested_at)
    server.bench.service.poll_cancellations()
    wait_until(lambda: server.client.get(job.id).state is JobState.CANCELLED)


def test_a_key_of_idempotency_is_one_job_for_its_owner(server: Server) -> None:
    asked: dict[str, Any] = CHAT | {"max_tokens": 9, "extra_headers": {"Idempotency-Key": "k"}}
    first, second = (server.openai().chat.completions.create(**asked) for _ in range(2))
    assert first.id == second.id
    streamed = list(server.openai().chat.completions.create(**asked, stream=True))
    assert streamed[0].id == first.id
    assert server.openai(BOB).chat.completions.create(**asked).id != first.id
    with pytest.raises(openai.ConflictError, match="belongs to job"):
        server.openai().chat.completions.create(**asked | {"max_tokens": 8})
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key: must have"):
        server.openai().chat.completions.create(**asked | {"extra_headers": {"Idempotency-Key": "k" * 129}})


def test_retries_of_the_client_come_through_once_there_is_room(start: Callable[..., Any]) -> None:
    with start(limits=ServerLimits(requests=1)) as server:
        server.bench.runner.seconds = 0.01
        with server.openai().chat.completions.create(
            **CHAT, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        ) as open_stream:
            with pytest.raises(openai.RateLimitError, match="1 requests are open already") as caught:
                server.openai().models.list()
            assert caught.value.response.headers["retry-after"] == "2"
            models = server.openai(max_retries=5).models.list()
            assert [model.id for model in models] == ["model"]
            assert list(open_stream)


def test_events_are_as_they_should_be_on_the_wire(server: Server) -> None:
    with server.http().stream(
        "POST", "/v1/completions", json=PLAIN | {"stream": True, "seed": 2, "max_tokens": 30}
    ) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        *events, done, rest = answer.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(2, max_tokens=30)
