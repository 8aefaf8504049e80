"""Idempotency keys: the same content is the same job, other content a conflict."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.grouping import ROWS_PER_TRANSACTION
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    IdempotencyConflictError,
)
from nightmill.jobs.sql.jobs import Selection


def test_the_same_key_and_content_give_the_first_job_and_one_message(client: Client) -> None:
    first = client.enqueue("prompt", idempotency_key="k", max_tokens=5, model="m")
    again = client.enqueue("prompt", idempotency_key="k", max_tokens=5, model="m", priority=9)
    assert again == first
    assert len(client.list_jobs()) == 1
    assert client.broker.queue_length("m") == 1


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "other"},
        {"prompt": "prompt", "max_tokens": 6},
        {"prompt": "prompt", "model": "m"},
        {"prompt": "prompt", "seed": 4},
        {"messages": [{"role": "user", "content": "prompt"}]},
    ],
)
def test_the_same_key_with_other_content_is_a_conflict(client: Client, other: dict[str, Any]) -> None:
    first = client.enqueue("prompt", idempotency_key="k", max_tokens=5)
    with pytest.raises(IdempotencyConflictError) as caught:
        client.enqueue_many([other], idempotency_key="k")
    assert str(caught.value).startswith(
        f"idempotency_key: 'k' belongs to job {first}, which has another prompt, model or parameters"
    )
    assert caught.value.field == "idempotency_key"
    assert [job.id for job in client.list_jobs()] == [first]


def test_enqueues_that_race_with_one_key_make_one_job(server_settings: Settings) -> None:
    with Client(server_settings) as client:
        barrier = threading.Barrier(8)

        def enqueue(_: int) -> str:
            barrier.wait(120)
            return client.enqueue("prompt", idempotency_key="k")

        with ThreadPoolExecutor(8) as pool:
            ids = set(pool.map(enqueue, range(8)))
        assert [job.id for job in client.list_jobs()] == list(ids)


def test_batches_that_race_with_the_same_keys_in_other_orders_make_each_job_once(
    server_settings: Settings,
) -> None:
    items = [{"prompt": f"{n}", "idempotency_key": f"k{n}", "batch": f"b{n % 7}"} for n in range(200)]
    with Client(server_settings) as client:
        barrier = threading.Barrier(2)

        def enqueue(backwards: bool) -> list[str]:
            barrier.wait(120)
            return list(client.enqueue_many(reversed(items) if backwards else items))

        with ThreadPoolExecutor(2) as pool:
            forwards, backwards = pool.map(enqueue, [False, True])
        assert forwards == backwards[::-1]
        assert sorted(job.id for job in client.list_jobs(limit=1000)) == sorted(forwards)


def test_the_same_key_twice_in_one_call_is_one_job(client: Client) -> None:
    items = [
        {"prompt": "a", "idempotency_key": "k"},
        {"prompt": "b"},
        {"prompt": "a", "idempotency_key": "k"},
    ]
    first, second, third = client.enqueue_many(items)
    assert first == third != second
    assert len(client.list_jobs()) == 2


def test_a_conflict_in_the_middle_keeps_what_came_before_and_says_so(client: Client) -> None:
    client.enqueue("taken", idempotency_key="k")
    number = ROWS_PER_TRANSACTION + 2
    items: list[Any] = [f"prompt {n}" for n in range(number)]
    items += [{"prompt": "other", "idempotency_key": "k"}, "after"]
    with pytest.raises(
        IdempotencyConflictError, match=f"^item {number}: .*{number} jobs before it"
    ) as caught:
        client.enqueue_many(items, batch="b")
    assert len(caught.value.enqueued) == number
    found = client.store.find(Selection(batch="b"))
    assert [job.id for job in found] == list(caught.value.enqueued)
    assert [job.prompt for job in found] == items[:number]
