"""Several prompts in one request to /v1/completions: each a job, and one answer for all of them."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from nightmill.jobs.base.contract import FINAL_STATES, JobState
from nightmill.jobs.formats.openai import MAX_PROMPTS
from nightmill.jobs.reply.answers import answer_seed
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.job_service import ServerLimits
from tests.support.servers import wait_until
from tests.unit.server.conftest import BOB, EVE, Server, Slow, text_of
from tests.unit.worker.bench import PROMPT as IDS

PLAIN: dict[str, Any] = {"model": "model", "max_tokens": 30}


def all_ended(server: Server) -> bool:
    server.bench.service.poll_cancellations()
    return all(job.state in FINAL_STATES for job in server.client.list_jobs(limit=100))


@pytest.mark.parametrize("prompt", [["Once"], [list(IDS)]])
def test_a_list_of_one_is_as_the_prompt_alone(server: Server, prompt: Any) -> None:
    client = server.openai()
    answer = client.completions.create(**PLAIN, prompt=prompt, seed=3)
    alone = client.completions.create(**PLAIN, prompt=prompt[0], seed=3)
    assert (answer.choices, answer.usage) == (alone.choices, alone.usage)
    job = server.client.get(answer.id.removeprefix("cmpl-"))
    assert (job.prompt or job.prompt_ids, job.request_id) == (prompt[0], None)


@pytest.mark.parametrize("prompts", [["Once", "In the night", "Far away"], [[5], [6, 7], [8]], ["a", [1, 2]]])
@pytest.mark.parametrize("n", [1, 2])
def test_each_prompt_has_its_answers_at_their_index_whole_and_streamed(
    server: Server, prompts: Any, n: int
) -> None:
    client, count = server.openai(), len(prompts)
    whole = client.completions.create(**PLAIN, prompt=prompts, n=n, seed=3)
    texts = [text_of(answer_seed(3, number), max_tokens=30) for number in range(n)] * count
    assert [choice.index for choice in whole.choices] == list(range(count * n))
    assert [choice.text for choice in whole.choices] == texts
    request_id = whole.id.removeprefix("cmpl-")
    with server.http() as http:
        jobs = http.get("/v1/jobs", params={"request": request_id, "order": "asc"}).json()["data"]
    found = [server.client.get(job["id"]) for job in jobs]
    assert [job.prompt or job.prompt_ids for job in found] == prompts
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(job.prompt_tokens or 0 for job in found) == 3 * count
    assert whole.usage.completion_tokens == sum(job.completion_tokens or 0 for job in found)
    joined, ends, last = [""] * count * n, dict[int, str](), None
    for chunk in client.completions.create(
        **PLAIN, prompt=prompts, n=n, seed=3, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            assert choice.index not in ends
            joined[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
        last = chunk
    assert joined == texts
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert last is not None and (last.choices, last.usage) == ([], whole.usage)


def test_equal_prompts_have_seeds_of_their_own_which_repeat_each_alone(server: Server) -> None:
    client = server.openai()
    choices = client.completions.create(**PLAIN, prompt=["Once"] * 4, n=2).choices
    seeds = [choice.model_extra["seed"] for choice in choices if choice.model_extra]
    assert len(set(seeds)) == 8
    for choice, seed in zip(choices, seeds, strict=True):
        assert client.completions.create(**PLAIN, prompt="Once", seed=seed).choices[0].text == choice.text


def test_log_probabilities_stream_with_the_prompts_that_they_are_of(server: Server) -> None:
    client, asked = server.openai(), PLAIN | {"prompt": ["a", "b"], "logprobs": 1, "echo": True}
    whole = client.completions.create(**asked, seed=1).choices
    tokens: list[list[str]] = [[], []]
    for chunk in client.completions.create(**asked, seed=1, stream=True):
        for choice in chunk.choices:
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert tokens == [choice.logprobs.tokens for choice in whole]


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_the_worker_refuses_refuses_the_request_and_leaves_nothing_to_do(
    server: Server, stream: bool
) -> None:
    server.bench.runner.seconds = 0.05  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match=r"prompt\[2\]: the template refuses") as caught:
        server.openai().completions.create(
            **PLAIN | {"max_tokens": 190},
            prompt=["a", "b", "unspeakable"],
            stream=stream,
            extra_body={"ignore_eos": True},
        )
    assert caught.value.param == "prompt[2]"
    wait_until(lambda: all_ended(server))
    states = [job.state for job in server.client.list_jobs()]
    assert sorted(states) == sorted([JobState.FAILED, JobState.CANCELLED, JobState.CANCELLED])


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": ["a", ""]}, "prompt[1]", "is empty"),
        ({"prompt": ["a", 5]}, "prompt[1]", "must be a text or a list of token ids, not a number"),
        ({"prompt": [[1, 2], []]}, "prompt[1]", "is empty"),
        ({"prompt": [[1, 2], [3, -1]]}, "prompt[1][1]", "must be a token id"),
        ({"prompt": [[1, 2], [["a"]]]}, "prompt[1]", "must be a text or a list of token ids, not a list"),
        ({"prompt": [{"role": "user"}]}, "prompt", "not a list that begins with an object"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", "has 1,025 prompts, more than 1,024"),
        ({"prompt": ["a", "b"], "max_tokens": 0}, "max_tokens", "must be at least"),
        (
            {"prompt": ["a"] * 1000, "max_tokens": 20_000},
            "prompt",
            "1,000 prompts may have more than 16,777,216 tokens and log-probabilities",
        ),
    ],
)
def test_a_list_that_cannot_be_is_refused_by_the_place_of_what_is_wrong(
    server: Server, body: dict[str, Any], param: str, said: str
) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json=PLAIN | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert server.client.list_jobs() == []


def test_a_key_of_idempotency_is_that_of_all_prompts_together(server: Server) -> None:
    asked: dict[str, Any] = PLAIN | {"extra_headers": {"Idempotency-Key": "k"}}
    prompts = ["a", "b", "c"]
    first, second = (server.openai().completions.create(**asked, prompt=prompts) for _ in range(2))
    assert (first.id, first.choices) == (second.id, second.choices)
    assert server.openai(BOB).completions.create(**asked, prompt=prompts).id != first.id
    for others in ("a", ["a", "b"], ["a", "b", "d"], ["a", "b", "c", "d"]):
        with pytest.raises(openai.ConflictError, match="belongs to job"):
            server.openai().completions.create(**asked, prompt=others)
    assert len(server.client.list_jobs()) == 6


def test_all_prompts_of_a_request_are_queued_or_none(start: Callable[..., Any]) -> None:
    with start(limits=ServerLimits(queued=3), worker=False) as server:
        specs = [JobSpec.parse("later")] * 2
        server.client.enqueueing.enqueue_request(specs, owner="alice")
        with pytest.raises(openai.RateLimitError, match="3 jobs that a key may have queued"):
            server.openai().completions.create(**PLAIN, prompt=["a", "b"])
        with pytest.raises(openai.BadRequestError, match="4 prompts, and a key may have 3 jobs queued"):
            server.openai().completions.create(**PLAIN, prompt=["a"] * 4)
        assert len(server.client.list_jobs()) == 2


def test_a_request_is_listed_and_cancelled_by_its_id(start: Callable[..., Any]) -> None:
    with start(worker=False) as server:
        specs = [JobSpec.parse(prompt) for prompt in ("a", "b", "c")]
        request_id, job_ids = server.client.enqueueing.enqueue_request(specs, owner="alice")
        other = server.client.enqueueing.enqueue_request(specs[:2], owner="alice")
        server.client.cancel(job_ids[1])
        wanted = {"request": request_id}
        for key, status in ((BOB, 404), (EVE, 403)):
            with server.http(key) as http:
                assert http.request("DELETE", "/v1/jobs", params=wanted).status_code == status
        with server.http(BOB) as http:
            assert http.get("/v1/jobs", params=wanted).json()["data"] == []
        with server.http() as http:
            listed = http.get("/v1/jobs", params=wanted | {"order": "asc"}).json()["data"]
            assert [job["id"] for job in listed] == job_ids
            assert {job["request_id"] for job in listed} == {request_id}
            for query in ({}, wanted | {"state": "queued"}):
                assert http.request("DELETE", "/v1/jobs", params=query).status_code == 400
            cancelled = http.request("DELETE", "/v1/jobs", params=wanted).json()["data"]
            assert [(job["id"], job["state"]) for job in cancelled] == [(one, "cancelled") for one in job_ids]
        assert {server.client.get(one).state for one in other.job_ids} == {JobState.QUEUED}


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_has_all_jobs_of_the_request_cancelled(server: Server, stream: bool) -> None:
    runner = server.bench.runner
    assert isinstance(runner, Slow)
    runner.seconds = 0.05
    asked: dict[str, Any] = PLAIN | {"max_tokens": 190, "prompt": ["a", "b", "c"]}
    if stream:
        answer = server.openai().completions.create(**asked, extra_body={"ignore_eos": True}, stream=True)
        next(iter(answer))
        answer.close()
    else:
        server.left("/v1/completions", asked | {"ignore_eos": True}, jobs=3)
    wait_until(lambda: all_ended(server))
    assert {job.state for job in server.client.list_jobs()} == {JobState.CANCELLED}


def test_many_prompts_at_once(server: Server) -> None:
    prompts = [f"number {number}" for number in range(200)]
    choices = server.openai().completions.create(**PLAIN | {"max_tokens": 3}, prompt=prompts, seed=2).choices
    assert [choice.text for choice in choices] == [text_of(2, max_tokens=3)] * 200
    texts = [""] * 200
    for chunk in server.openai().completions.create(
        **PLAIN | {"max_tokens": 3}, prompt=prompts, seed=2, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [text_of(2, max_tokens=3)] * 200
