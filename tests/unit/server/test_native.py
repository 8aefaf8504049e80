"""Our own endpoints: jobs, and their texts as events."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.request.fields import FIELDS, INTERACTIVE, PARAMETERS
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.streams.pieces import START
from tests.support.servers import wait_until
from tests.unit.server.conftest import ALICE, BOB, EVE, KEYS, OPS, Server, listening, text_of

ASKED: dict[str, Any] = {"prompt": "Once", "seed": 4, "max_tokens": 40}


def events(answer: httpx2.Response) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """(id, data) of each event, comments left out."""
    for block in answer.read().decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and line[0] != ":")
        if fields:
            yield fields.get("id"), json.loads(fields["data"])


def post_for_events(http: httpx2.Client, path: str, **body: Any) -> list[tuple[str | None, dict[str, Any]]]:
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events(answer))


def test_execute_gives_the_text_in_numbered_events_and_what_became_of_the_job(server: Server) -> None:
    with server.http() as http:
        *pieces, (_, end) = post_for_events(http, "/execute", job_id="mine", **ASKED)
        text = text_of(4, max_tokens=40)
        assert "".join(piece["t"] for _, piece in pieces) == text
        read = 0
        for place, piece in pieces:
            assert piece["i"] == read
            read += len(piece["t"])
            assert place == str(START.past(text[:read]))
        job = server.client.get(end["job_id"])
        assert (end["stop_reason"], end["tokens_out"], end["tokens_in"]) == (
            job.stop_reason,
            job.completion_tokens,
            3,
        )
        assert (end["state"], end["error"]) == ("succeeded", None)
        assert job.finished_at is not None and end["finished_at"] == job.finished_at.isoformat()
        assert (job.owner, job.priority, job.deadline_at) == ("alice", INTERACTIVE, None)
        again = post_for_events(http, "/execute", job_id="mine", **ASKED)
        assert again[-1][1] == end  # the same job
        other = http.post("/execute", json=ASKED | {"job_id": "mine", "seed": 5})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    with server.http(BOB) as http:
        assert post_for_events(http, "/execute", job_id="mine", **ASKED)[-1][1]["job_id"] != end["job_id"]


def test_generate_gives_the_job_at_once_or_events(server: Server) -> None:
    with server.http() as http:
        answer = http.post("/v1/generate", json=ASKED)
        job = answer.json()
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, job["id"])
        assert (job["text"], job["state"]) == (text_of(4, max_tokens=40), "succeeded")
        *pieces, (_, end) = post_for_events(http, "/v1/generate", stream=True, **ASKED)
        assert "".join(piece["t"] for _, piece in pieces) == job["text"]
        assert end["job_id"] != job["id"]
        failed = http.post("/v1/generate", json={"prompt": "unspeakable"}).json()
        assert (failed["state"], failed["error"]) == ("failed", "the template refuses")
        assert post_for_events(http, "/execute", prompt="unspeakable")[-1][1]["error"] == failed["error"]


def test_a_job_that_takes_longer_than_a_request_goes_on(start: Callable[..., Any]) -> None:
    with start(limits=ServerLimits(request_seconds=0.3, grace_seconds=0)) as server, server.http() as http:
        server.bench.runner.seconds = 0.05
        answer = http.post("/v1/generate", json=ASKED | {"ignore_eos": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        (job,) = server.client.list_jobs()
        assert job.id in answer.json()["error"]["message"]
        server.client.wait(job.id, timeout=240)
        assert http.get(f"/v1/jobs/{job.id}").json()["text"] == text_of(4, max_tokens=40, ignore_eos=True)


def test_everything_that_enqueue_may_be_told_may_be_said_here(server: Server) -> None:
    said = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 3,
        "repetition_penalty": 1.1,
        "stop": ["x", "y"],
        "ignore_eos": True,
        "model": "model",
        "stop_token_ids": [3],
        "min_tokens": 1,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": 1.0},
        "bad_words": ["x"],
        "logprobs": 2,
        "echo": False,
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "truncate_prompt_tokens": 3,
        "reasoning_effort": "low",
        "max_reasoning_tokens": 4,
        "embed": False,
        "dimensions": None,
        "pooling": None,
        "rerank": None,
        "instruction": None,
        "score": [],
        "include_stop_str_in_output": True,
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
        "continue_final_message": False,
        "priority": 2,
        "custom_id": "c",
        "metadata": {"a": [1]},
        "max_attempts": 2,
        "reuse": "exact",
        "scheduled_at": "2030-01-01T01:00+00:00",
        "deadline": "8h",
    }
    assert said.keys() == FIELDS.keys() - {"batch", "idempotency_key"} - CONSTRAINT_FIELDS.keys()
    with server.http() as http:
        answer = http.post("/v1/jobs", json=said | {"messages": [{"role": "user", "content": "Hello"}]})
        assert answer.status_code == 202
        job = server.client.get(answer.json()["id"])
        chosen = http.post("/v1/jobs", json={"prompt": "Once", "choice": ["yes", "no"], "scheduled_at": "8h"})
        constrained = server.client.get(chosen.json()["id"]).constrained
    assert job.rendering is not None and job.rendering.tools is not None
    assert job.rendering.tools.names == {"weather"} and not job.rendering.tools.parallel
    assert constrained is not None and "no" in repr(constrained)
    params = {name: value for name, value in said.items() if name in PARAMETERS}
    assert job.params.model_dump(mode="json") == params
    assert (job.priority, job.custom_id, job.metadata, job.max_attempts) == (2, "c", {"a": [1]}, 2)
    assert job.scheduled_at is not None and job.deadline_at is not None
    assert (job.deadline_at - job.scheduled_at).total_seconds() == 8 * 3600


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": 1}, "prompt"),
        ({"messages": []}, "prompt"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"batch": "b"}, "batch"),
        ({"idempotency_key": "k"}, "idempotency_key"),
        ({"owner": "bob"}, "owner"),
        ({"job_id": ""}, "job_id"),
        ({"job_id": "x" * 129}, "job_id"),
        ({"stream": 1}, "stream"),
        ({"cancel_on_close": "no"}, "cancel_on_close"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": 5}, "deadline"),
        ({"scheduled_at": "9999999999w"}, "scheduled_at"),
        ({"model": "modle"}, "model"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(
    server: Server, more: dict[str, Any], param: str
) -> None:
    with server.http() as http:
        for path in ("/execute", "/v1/generate", "/v1/jobs"):
            answer = http.post(path, json=ASKED | more)
            assert answer.status_code == (404 if param == "model" else 400)
            error = answer.json()["error"]
            assert (error["param"], error["message"].partition(":")[0]) == (param, param)
    assert server.client.list_jobs() == []


def test_a_time_that_is_a_number_is_refused_in_the_words_of_json(server: Server) -> None:
    with server.http() as http:
        said = http.post("/v1/jobs", json=ASKED | {"deadline": 5}).json()["error"]["message"]
    assert said == "deadline: must be a time as a text, such as 8h, not a number"


def test_a_key_sees_and_changes_its_own_jobs_and_pages_through_them(start: Callable[..., Any]) -> None:
    with start(worker=False) as server:
        with server.http() as http:
            ids = [http.post("/v1/jobs", json={"prompt": str(number)}).json()["id"] for number in range(5)]
            read: list[str] = []
            page: dict[str, Any] = {"has_more": True}
            while page["has_more"]:
                query = {"limit": 2} | ({"after": read[-1]} if read else {})
                page = http.get("/v1/jobs", params=query).json()
                read += [job["id"] for job in page["data"]]
            assert read == ids[::-1]
            assert http.delete(f"/v1/jobs/{ids[0]}").json()["state"] == "cancelled"
            assert http.delete(f"/v1/jobs/{ids[0]}").status_code == 200
            cancelled = http.get("/v1/jobs", params={"state": "cancelled"}).json()["data"]
            assert [job["id"] for job in cancelled] == ids[:1]
            for limit in ("0", "x", "101", "-1", "9" * 5_000):
                assert http.get("/v1/jobs", params={"limit": limit}).status_code == 400
            for query in ({"state": "lost"}, {"after": "x"}, {"after": "\x00"}):
                assert http.get("/v1/jobs", params=query).status_code == 400
            local = server.client.enqueue("of this machine")
            for job_id in (local, "0" * 32, "x", "%00", "\udc80".encode("utf-8", "surrogatepass").hex()):
                assert http.get(f"/v1/jobs/{job_id}").status_code == 404
        with server.http(BOB) as http:
            assert http.get("/v1/jobs").json()["data"] == []
            for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
                answer = http.request(method, f"/v1/jobs/{ids[1]}{path}")
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
        with server.http(EVE) as http:
            assert len(http.get("/v1/jobs").json()["data"]) == 6
            assert http.get(f"/v1/jobs/{ids[1]}").status_code == 200
            for answer in (http.delete(f"/v1/jobs/{ids[1]}"), http.post("/v1/jobs", json=ASKED)):
                assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert server.client.get(ids[1]).state is JobState.QUEUED
        with server.http(OPS) as http:
            assert http.delete(f"/v1/jobs/{ids[1]}").json()["owner"] == "alice"
        assert server.client.get(ids[1]).state is JobState.CANCELLED


def test_a_key_may_queue_so_many_jobs_and_others_are_not_hindered(start: Callable[..., Any]) -> None:
    with start(worker=False, limits=ServerLimits(queued=3)) as server, server.http() as http:
        first = http.post("/v1/jobs", json=ASKED | {"job_id": "mine"})
        answers = [first, *(http.post("/v1/jobs", json=ASKED) for _ in range(3))]
        assert [answer.status_code for answer in answers] == [202, 202, 202, 429]
        assert answers[3].json()["error"]["code"] == "queue_full" and "retry-after" in answers[3].headers
        again = http.post("/v1/jobs", json=ASKED | {"job_id": "mine"})
        assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
        assert (
            http.post("/v1/jobs", json=ASKED, headers={"Authorization": f"Bearer {BOB}"}).status_code == 202
        )
        http.delete(f"/v1/jobs/{answers[0].json()['id']}")
        assert http.post("/v1/jobs", json=ASKED).status_code == 202


def test_a_reader_that_comes_back_to_any_server_misses_and_repeats_nothing(server: Server) -> None:
    server.bench.runner.seconds = 0.02  # type: ignore[attr-defined]
    with listening(server.client, KEYS) as port, server.http() as http:
        servers = [server.url, f"http://127.0.0.1:{port}"]
        job_id = http.post("/v1/jobs", json=ASKED | {"ignore_eos": True, "max_tokens": 100}).json()["id"]
        text, last, over = "", "", False
        headers = {"Authorization": f"Bearer {ALICE}"}
        for number in range(1000):
            url = f"{servers[number % 2]}/v1/jobs/{job_id}/events"
            with http.stream("GET", url, headers=headers) as answer:
                for line in answer.iter_lines():
                    if line.startswith("id: "):
                        last = line.removeprefix("id: ")
                    if line.startswith("data: "):
                        data = json.loads(line.removeprefix("data: "))
                        over = "t" not in data
                        text += data.get("t", "")
                        break  # the connection is lost
            headers["Last-Event-ID"] = last
            if over:
                break
        assert text == text_of(4, ignore_eos=True, max_tokens=100)
        assert server.client.get(job_id).state is JobState.SUCCEEDED
        for place, status in (("5-00000000", "stream_changed"), ("nonsense", "Last-Event-ID: must be")):
            answer = http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": place})
            assert status in answer.text


@pytest.mark.parametrize("cancel", [False, True])
def test_closing_a_stream_cancels_the_job_if_that_was_asked_for(server: Server, cancel: bool) -> None:
    server.bench.runner.seconds = 0.02  # type: ignore[attr-defined]
    body = ASKED | {"ignore_eos": True, "max_tokens": 150 if cancel else 30, "cancel_on_close": cancel}
    with server.http() as http, http.stream("POST", "/execute", json=body) as answer:
        next(answer.iter_lines())
        job_id = answer.headers["x-request-id"]
    if cancel:
        wait_until(lambda: server.client.get(job_id).cancel_requested_at)
        server.bench.service.poll_cancellations()
    server.client.wait(job_id, timeout=240)
    state = server.client.get(job_id).state
    assert state is (JobState.CANCELLED if cancel else JobState.SUCCEEDED)
