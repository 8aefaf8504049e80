"""Tiers of service: `flex` ranks as batches do, waits for as long as the server says, and is echoed."""

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from nightmill.jobs.commands.serve import serve
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.fields import INTERACTIVE
from nightmill.jobs.server import serving
from nightmill.jobs.server.job_service import DATABASE_THREADS, FLEX_THREADS, JobService, ServerLimits
from nightmill.jobs.server.keys import ApiKeys
from nightmill.jobs.server.tiers import Tier, asked_tier
from tests.unit.server.conftest import ALICE, BOB, Server, text_of

CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "Hello"}],
    "seed": 3,
    "max_tokens": 20,
}
USUAL = 5
"""The priority of batches that say nothing else."""


def job_of(server: Server, answer: Any) -> Job:
    return server.client.get(answer.id.partition("-")[2])


def test_a_flex_call_has_the_priority_of_batches_and_its_tier_is_echoed(server: Server) -> None:
    client = server.openai()
    flex = client.chat.completions.create(**CHAT, service_tier="flex")
    plain = client.completions.create(
        model="model", prompt="Once", seed=3, max_tokens=20, extra_body={"service_tier": "flex"}
    )
    assert flex.service_tier == plain.service_tier == "flex"  # type: ignore[attr-defined]
    assert flex.choices[0].message.content == plain.choices[0].text == text_of(3, max_tokens=20)
    assert job_of(server, flex).priority == job_of(server, plain).priority == USUAL
    chunks = list(client.chat.completions.create(**CHAT, service_tier="flex", stream=True))
    assert {chunk.service_tier for chunk in chunks} == {"flex"}
    assert job_of(server, chunks[0]).priority == USUAL


@pytest.mark.parametrize("name", [None, "auto", "default", "priority", "scale"])
def test_other_tiers_are_interactive_as_without_one(server: Server, name: Any) -> None:
    client = server.openai()
    answer = client.chat.completions.create(**CHAT, service_tier=name)
    assert (answer.service_tier, job_of(server, answer).priority) == ("default", INTERACTIVE)
    chunks = list(client.chat.completions.create(**CHAT, service_tier=name, stream=True))
    assert {chunk.service_tier for chunk in chunks} == {"default"}


def test_our_own_endpoints_take_it_too(server: Server) -> None:
    with server.http() as http:
        flex = http.post("/v1/generate", json={"prompt": "Once", "max_tokens": 3, "service_tier": "flex"})
        usual = http.post("/v1/generate", json={"prompt": "Once", "max_tokens": 3})
        streamed = http.post("/execute", json={"prompt": "Once", "max_tokens": 3, "service_tier": "flex"})
        ranked = {"prompt": "Once", "max_tokens": 3, "service_tier": "flex", "priority": 1}
        assert http.post("/v1/generate", json=ranked).json()["priority"] == 1
    assert (flex.json()["priority"], usual.json()["priority"]) == (USUAL, INTERACTIVE)
    assert server.client.get(streamed.headers["x-request-id"]).priority == USUAL


@pytest.mark.parametrize(
    ("name", "said"), [("fast", "must be one of"), (3, "must be a text"), ([], "must be")]
)
def test_a_tier_that_is_none_is_refused(server: Server, name: Any, said: str) -> None:
    with server.http() as http:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/generate", {"prompt": "Once"})):
            answer = http.post(path, json=body | {"service_tier": name})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "service_tier")
            assert said in error["message"]


def test_a_key_may_have_flex_as_its_tier(start: Callable[..., Any]) -> None:
    with start(keys=f"alice:flex={ALICE}, bob={BOB}") as server:
        for key, name, tier in (
            (ALICE, None, "flex"),
            (ALICE, "auto", "flex"),
            (ALICE, "default", "default"),
            (BOB, None, "default"),
            (BOB, "flex", "flex"),
        ):
            answer = server.openai(key).chat.completions.create(**CHAT, service_tier=name)
            assert answer.service_tier == tier, (key, name)
            assert job_of(server, answer).priority == (USUAL if tier == "flex" else INTERACTIVE)


@pytest.mark.parametrize("longer", ["flex", "default"])
def test_each_tier_has_a_wait_of_its_own(start: Callable[..., Any], longer: str) -> None:
    seconds = {"request_seconds": 0.3, "flex_seconds": 0.3}
    seconds["flex_seconds" if longer == "flex" else "request_seconds"] = 60.0
    shorter = "default" if longer == "flex" else "flex"
    slow: dict[str, Any] = CHAT | {"max_tokens": 180, "extra_body": {"ignore_eos": True}}
    with start(limits=ServerLimits(**seconds)) as server:  # type: ignore[arg-type]
        server.bench.runner.seconds = 0.005  # a step: 180 take 0.9 s
        client = server.openai()
        with pytest.raises(openai.InternalServerError) as late:
            client.chat.completions.create(**slow, service_tier=shorter)
        assert late.value.status_code == 504
        answer = client.chat.completions.create(**slow, service_tier=longer)
        assert answer.usage is not None and answer.usage.completion_tokens == 180
        job = job_of(server, answer)
        assert job.deadline_at is not None and job.deadline_at - job.created_at == timedelta(seconds=60)


def test_without_a_worker_the_connection_is_let_go_after_the_wait_of_the_tier(
    start: Callable[..., Any],
) -> None:
    limits = ServerLimits(request_seconds=60.0, flex_seconds=0.2, grace_seconds=0.2)
    late = pytest.raises(openai.InternalServerError, match="did not finish in time; it continues")
    with start(limits=limits, worker=False) as server, late:  # a worker that lives, and takes nothing
        server.openai().chat.completions.create(**CHAT, service_tier="flex")


@pytest.mark.parametrize(
    ("arguments", "variable", "seconds"),
    [([], None, 600.0), ([], "90", 90.0), (["--flex-seconds", "7200"], "90", 7200.0)],
)
def test_the_wait_is_set_by_option_or_variable(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str | None, seconds: float
) -> None:
    limits: list[ServerLimits] = []
    monkeypatch.setattr(serving, "serve", lambda settings, host, port, given, *others: limits.append(given))
    environ = {} if variable is None else {"NIGHTMILL_FLEX_SECONDS": variable}
    result = CliRunner().invoke(serve, arguments, env=environ, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert limits[0].flex_seconds == seconds


def test_statements_of_flex_calls_leave_threads_to_others(start: Callable[..., Any]) -> None:
    running, most, over = 0, 0, threading.Event()
    lock = threading.Lock()

    def statement() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        over.wait(5.0)
        with lock:
            running -= 1

    async def flood(service: JobService) -> None:
        asked_tier.set(Tier.FLEX)
        calls = [asyncio.create_task(service.run(statement)) for _ in range(3 * DATABASE_THREADS)]
        asked_tier.set(Tier.DEFAULT)
        while running < FLEX_THREADS:
            await asyncio.sleep(0.001)
        assert await service.run(lambda: "answered") == "answered"  # while all of those wait
        assert not over.is_set()
        over.set()
        await asyncio.gather(*calls)

    with start(worker=False) as server:
        service = JobService(server.client, ApiKeys.parse(None), ServerLimits())
        asyncio.run(flood(service))
        service.close()
    assert most == FLEX_THREADS
