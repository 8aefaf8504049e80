"""Enqueueing: what is kept, in which order, how much at once, and what a key or a mistake does."""

import gc
import tracemalloc
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.batches.grouping import ROWS_PER_TRANSACTION
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    IdempotencyConflictError,
    InvalidParameterError,
    InvalidPromptError,
)
from nightmill.jobs.sql.jobs import Selection
from tests.support.servers import Clock


def test_a_job_is_kept_as_it_was_said(client: Client, clock: Clock) -> None:
    job_id = client.enqueue(
        "grüße 👋",
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=2**63 - 1,
        stop=["a", "b"],
        ignore_eos=True,
        stop_token_ids=[3, 5],
        min_tokens=2,
        n=3,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        logit_bias={"7": -100, 9: 1.5},
        bad_words="ugly",
        logprobs=5,
        echo=True,
        batch="tonight",
        custom_id="mine",
        priority=9,
        max_attempts=2,
        idempotency_key="key",
        metadata={"deep": [1, {"ü": None}]},
    )
    job = client.get(job_id)
    assert (job.id, job.state, job.prompt, job.messages) == (job_id, JobState.QUEUED, "grüße 👋", None)
    assert job.params.model_dump() == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 2**63 - 1,
        "stop": ("a", "b"),
        "ignore_eos": True,
        "stop_token_ids": (3, 5),
        "min_tokens": 2,
        "n": 3,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "logit_bias": {7: -100.0, 9: 1.5},
        "bad_words": ("ugly",),
        "logprobs": 5,
        "echo": True,
        "score": (),
        "include_stop_str_in_output": False,
        "prompt_logprobs": None,
        "return_token_ids": False,
        "truncate_prompt_tokens": None,
        "max_reasoning_tokens": None,
        "embed": False,
        "dimensions": None,
        "pooling": None,
        "rerank": None,
        "instruction": None,
    }
    assert (job.batch, job.custom_id, job.priority, job.max_attempts) == ("tonight", "mine", 9, 2)
    assert (job.idempotency_key, job.metadata) == ("key", {"deep": [1, {"ü": None}]})
    assert (job.created_at, job.attempt, job.text, job.error) == (clock(), 0, None, None)


def test_a_chat_is_kept_as_messages(client: Client) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "hello\n"}]
    job = client.get(client.enqueue(chat))
    assert (job.prompt, job.messages) == (None, chat)


def test_token_ids_are_kept_as_they_are(client: Client) -> None:
    ids = client.enqueue_many([[5, 0, 2], np.array([1, 2], dtype=np.int64), {"prompt": (3,)}])
    assert [client.get(job_id).prompt_ids for job_id in ids] == [[5, 0, 2], [1, 2], [3]]
    assert {(client.get(job_id).prompt, client.get(job_id).messages is None) for job_id in ids} == {
        (None, True)
    }
    client.cancel(ids[0])
    assert client.retry(ids[0]).prompt_ids == [5, 0, 2]


def test_a_key_stands_for_its_token_ids(client: Client) -> None:
    first = client.enqueue([1, 2], idempotency_key="k")
    assert client.enqueue([1, 2], idempotency_key="k") == first
    with pytest.raises(IdempotencyConflictError):
        client.enqueue([1, 3], idempotency_key="k")


def test_a_seed_is_drawn_at_enqueue_and_kept_through_a_retry(client: Client) -> None:
    first, second = client.enqueue_many(["same", "same"])
    seeds = {client.get(first).seed, client.get(second).seed}
    assert len(seeds) == 2
    assert None not in seeds
    client.cancel(first)
    assert client.retry(first).seed in seeds
    assert {client.get(first).seed, client.get(second).seed} == seeds


def test_many_prompts_keep_their_order_and_their_own_settings(client: Client) -> None:
    def items() -> Iterator[Any]:
        yield "a text"
        yield [{"role": "user", "content": "a chat"}]
        yield {"prompt": "with settings", "max_tokens": 3, "priority": 8, "custom_id": "c"}
        yield {"messages": [{"role": "user", "content": "chat with settings"}], "temperature": 0.25}

    ids = client.enqueue_many(items(), batch="b", max_tokens=99, temperature=0.75)
    assert list(ids) == sorted(ids)
    found = client.store.find(Selection(batch="b"))
    assert [job.id for job in found] == list(ids)
    assert [job.prompt for job in found] == ["a text", None, "with settings", None]
    assert [job.params.max_tokens for job in found] == [99, 99, 3, 99]
    assert [job.params.temperature for job in found] == [0.75, 0.75, 0.75, 0.25]
    assert [(job.priority, job.custom_id) for job in found][2] == (8, "c")


def test_more_prompts_than_one_transaction_takes_stay_in_order(client: Client) -> None:
    number = 2 * ROWS_PER_TRANSACTION + 5
    ids = client.enqueue_many((f"prompt {n}" for n in range(number)), batch="b")
    assert len(ids) == number
    jobs = client.store.find(Selection(batch="b"))
    assert [job.id for job in jobs] == list(ids)
    assert [job.prompt for job in jobs] == [f"prompt {n}" for n in range(number)]


def test_no_prompts_make_no_jobs(client: Client) -> None:
    assert list(client.enqueue_many([])) == []
    assert client.list_jobs() == []


def test_work_begins_while_the_iterable_is_still_read(sqlite_client: Client) -> None:
    def prompts() -> Iterator[str]:
        for number in range(ROWS_PER_TRANSACTION + 1):
            if number == ROWS_PER_TRANSACTION:
                assert sqlite_client.stats()["state"] == {"queued": ROWS_PER_TRANSACTION}
                assert sqlite_client.broker.queue_length(None) == ROWS_PER_TRANSACTION // 64
            yield "prompt"

    assert len(sqlite_client.enqueue_many(prompts())) == ROWS_PER_TRANSACTION + 1


def test_large_prompts_are_committed_in_smaller_groups(
    sqlite_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightmill.jobs.batches.grouping.CHARACTERS_PER_TRANSACTION", 1000)

    def prompts() -> Iterator[str]:
        for number in range(5):
            if number in (2, 4):
                assert sqlite_client.stats()["state"] == {"queued": number}
            yield "x" * 500

    assert len(sqlite_client.enqueue_many(prompts())) == 5


def test_memory_does_not_grow_with_the_number_of_prompts(sqlite_client: Client) -> None:
    def peak(number: int) -> int:
        gc.collect()
        tracemalloc.reset_peak()
        ids = sqlite_client.enqueue_many(f"{n} " + "x" * 1000 for n in range(number))
        assert len(ids) == number
        return tracemalloc.get_traced_memory()[1]

    sqlite_client.enqueue_many(["warm the caches"] * (ROWS_PER_TRANSACTION + 1))
    tracemalloc.start(1)
    try:
        few, many = peak(1_000), peak(8_000)
    finally:
        tracemalloc.stop()
    # 7,000 more prompts are 7 MB of text; their ids are 0.1 MB.
    assert many - few < 1_000_000


def test_a_mistake_in_the_middle_keeps_what_came_before_and_says_so(client: Client) -> None:
    number = ROWS_PER_TRANSACTION + 3

    def items() -> Iterator[Any]:
        yield from (f"prompt {n}" for n in range(number))
        yield {"prompt": "bad", "max_tokens": -1}
        yield "not queued any more"

    with pytest.raises(InvalidParameterError) as caught:
        client.enqueue_many(items(), batch="b")
    assert str(caught.value) == (
        f"item {number}: max_tokens: must be at least 1 (got -1) ({number} jobs before it are queued)"
    )
    assert caught.value.field == "max_tokens"
    assert list(caught.value.enqueued) == [job.id for job in client.store.find(Selection(batch="b"))]
    assert len(caught.value.enqueued) == number


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            {"max_tokens": 3},
            "item 1: prompt: is missing; give a prompt (a text) or messages (a list) (1 jobs",
        ),
        ({"prompt": "x", "messages": []}, "item 1: prompt: give either prompt or messages, not both (1 jobs"),
        ({"prompt": "x", "max_tokns": 3}, "item 1: max_tokns: is not supported: did you mean max_tokens?"),
        ("a\x00", "item 1: prompt: contains a NUL character at position 1"),
        (b"x", "item 1: prompt: must be a text, a list of messages or of token ids, not bytes"),
    ],
)
def test_a_bad_item_is_named_by_its_place(sqlite_client: Client, item: Any, message: str) -> None:
    with pytest.raises((InvalidParameterError, InvalidPromptError)) as caught:
        sqlite_client.enqueue_many(["good", item])
    assert str(caught.value).startswith(message)
    assert len(caught.value.enqueued) == 1


@pytest.mark.parametrize(
    "settings", [{"max_tokens": -1}, {"temprature": 1}, {"deadline": datetime(2026, 1, 1)}]
)
def test_a_bad_setting_is_refused_before_anything_is_kept(
    sqlite_client: Client, settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameterError):
        sqlite_client.enqueue("prompt", **settings)
    with pytest.raises(InvalidParameterError):
        sqlite_client.enqueue_many(["prompt"], **settings)
    assert sqlite_client.list_jobs() == []
