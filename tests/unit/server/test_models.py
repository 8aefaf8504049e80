"""Which model answers a call, and what the caller is told where none does now."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import openai
import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.reply.job import IDLE
from nightmill.jobs.sql.claims import Claims
from tests.unit.server.conftest import Server

PLAIN: dict[str, Any] = {"model": "model", "prompt": "Once"}
CHAT: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "Hello"}]}


def test_an_answer_names_the_model_also_if_none_was_asked_for(server: Server) -> None:
    whole: Any = server.openai().post(
        "/completions", body={"prompt": "Once", "max_tokens": 3}, cast_to=object
    )
    assert whole["model"] == "model"
    with server.http() as http:
        said = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"model"}


def test_a_model_that_nobody_knows_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match=r"served 'modle'.*Did you mean 'model'"):
        server.openai().chat.completions.create(**CHAT | {"model": "modle"})


def test_without_a_live_worker_nobody_waits(start: Callable[..., Any]) -> None:
    with start(worker=False) as server:
        server.bench.claims.sign_off()
        with pytest.raises(openai.InternalServerError) as caught:
            server.openai().chat.completions.create(**CHAT)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "2"
        assert server.client.list_jobs() == []


@pytest.mark.parametrize("model", ["nobody", "elsewhere"])
def test_a_stream_from_a_model_that_is_not_served_has_the_status_that_says_so(
    server: Server, model: str
) -> None:
    Claims(server.client.database, "b" * 32).register("host", 2, "elsewhere", None)
    Claims(server.client.database, "b" * 32).sign_off()
    with server.http() as http:
        answers = [
            http.post("/v1/completions", json=PLAIN | {"model": model, "stream": stream})
            for stream in (True, False)
        ]
    assert [answer.status_code for answer in answers] == [503 if model == "elsewhere" else 404] * 2
    assert answers[0].json() == answers[1].json()


def test_a_call_wakes_an_idle_worker_and_is_told_of_one_that_sleeps_for_another_reason(
    server: Server,
) -> None:
    asked = PLAIN | {"model": "elsewhere"}
    sleeper = Claims(server.client.database, "b" * 32)
    sleeper.register("host", 2, "elsewhere", None)
    sleeper.beat(WorkerState.SLEEPING, "until 22:00 (22:00-06:00)")
    with server.http() as http:
        refused = http.post("/v1/completions", json=asked)
        begin = server.client.database.now().replace(second=0, microsecond=0) + timedelta(hours=3)
        hours = f"{begin:%H:%M}-{begin + timedelta(hours=1):%H:%M}/UTC"
        sleeper.beat(WorkerState.SLEEPING, f"until {begin:%H:%M} ({hours})", {"hours": hours})
        later = http.post("/v1/completions", json=asked)
        sleeper.beat(WorkerState.SLEEPING, IDLE)
        taken = http.post("/v1/completions", json=asked)
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    assert later.status_code == 503 and 10_000 < int(later.headers["Retry-After"]) <= 3 * 3600
    said = "each worker that serves 'elsewhere' sleeps, until 22:00 (22:00-06:00); submit a batch"
    assert said in refused.json()["error"]["message"]
    assert taken.status_code == 200  # the worker of this test takes jobs of every model


def test_a_call_for_a_model_that_waits_for_its_turn_is_told_when_to_come_again(server: Server) -> None:
    asked = PLAIN | {"model": "elsewhere"}
    worker = Claims(server.client.database, "b" * 32)
    worker.register("host", 2, "loaded", None)
    worker.register_models(["loaded", "elsewhere"], swap_for_interactive=False)
    with server.http() as http:
        worker.beat(WorkerState.READY, stats={"in_flight": 3})
        refused = http.post("/v1/completions", json=asked)
        flex = http.post("/v1/completions", json=asked | {"service_tier": "flex"})
        listed = {one["id"]: one["loaded"] for one in http.get("/v1/models").json()["data"]}
        worker.beat(WorkerState.READY, stats={"in_flight": 0})
        idle = http.post("/v1/completions", json=asked)
        worker.beat(WorkerState.READY, stats={"in_flight": 3})
        worker.register_models(["loaded", "elsewhere"], swap_for_interactive=True)
        swapping = http.post("/v1/completions", json=asked)
        worker.beat(WorkerState.SLEEPING, "until 22:00 (22:00-06:00)")
        asleep = http.post("/v1/completions", json=asked)
    assert refused.status_code == 503 and refused.headers["Retry-After"] == "60"
    said = (
        "the model 'elsewhere' is not loaded now: its worker serves 'loaded', and loads others in their turn"
    )
    assert said in refused.json()["error"]["message"] and refused.json()["error"]["code"] == "not_loaded"
    # The worker of this test takes jobs of every model.
    assert [answer.status_code for answer in (flex, idle, swapping)] == [200, 200, 200]
    assert (listed["loaded"], listed["elsewhere"]) == (True, False)
    assert asleep.status_code == 503 and "sleeps, until 22:00" in asleep.json()["error"]["message"]
