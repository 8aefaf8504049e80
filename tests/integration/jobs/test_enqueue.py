"""Enqueueing: what is kept, in which order, how much at once, and what a key or a mistake does."""

import gc
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from nightmill.jobs.batches.grouping import ROWS_PER_TRANSACTION
from nightmill.jobs.client import Client
from nightmill.jobs.contract import JobState
from nightmill.jobs.errors import (
    IdempotencyConflictError,
    InvalidParameterError,
    InvalidPromptError,
    InvalidTransitionError,
    JobNotFoundError,
    UnknownModelError,
)
from nightmill.jobs.settings import Settings
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.jobs import Selection
from nightmill.jobs.sql.sweep import Sweep
from tests.servers import Clock


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
    }
    assert (job.batch, job.custom_id, job.priority, job.max_attempts) == ("tonight", "mine", 9, 2)
    assert (job.idempotency_key, job.metadata) == ("key", {"deep": [1, {"ü": None}]})
    assert (job.created_at, job.attempt, job.text, job.error) == (clock(), 0, None, None)


def test_a_chat_is_kept_as_messages(client: Client) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "hello\n"}]
    job = client.get(client.enqueue(chat))
    assert (job.prompt, job.messages) == (None, chat)


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
        few, many = peak(2_000), peak(20_000)
    finally:
        tracemalloc.stop()
    # 18,000 more prompts are 18 MB of text; their ids are 0.3 MB.
    assert many - few < 2_000_000


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
        (b"x", "item 1: prompt: must be a text or a list of messages, not bytes"),
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


# -- idempotency keys ----------------------------------------------------------------------------


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
            barrier.wait(30)
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
            barrier.wait(30)
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


# -- models, deadlines, schedules ----------------------------------------------------------------


def test_a_deadline_that_has_passed_is_refused(sqlite_client: Client, clock: Clock) -> None:
    dawn = clock() + timedelta(hours=8)
    kept = sqlite_client.enqueue("prompt", deadline=dawn, idempotency_key="k")
    sqlite_client.cancel(kept)
    clock.advance(9 * 3600)
    for deadline in (dawn, timedelta(0), timedelta(seconds=-1)):
        for call in (
            lambda: sqlite_client.enqueue("prompt", deadline=deadline),  # noqa: B023
            lambda: sqlite_client.enqueue("prompt", deadline=deadline, idempotency_key="new"),  # noqa: B023
            lambda: sqlite_client.retry(kept, deadline=deadline),  # noqa: B023
        ):
            with pytest.raises(
                InvalidParameterError, match=r"^deadline: .* has passed \(it is .*: give a later"
            ):
                call()
    with pytest.raises(InvalidParameterError, match=r"^item 1: deadline: .* \(1 jobs before it are queued\)"):
        sqlite_client.enqueue_many(["a", {"prompt": "b", "deadline": dawn}])
    # a second enqueue with the key of a job that was in time returns that
    assert sqlite_client.enqueue("prompt", deadline=dawn, idempotency_key="k") == kept


def test_a_model_nobody_serves_is_refused_with_a_suggestion(client: Client) -> None:
    early = client.enqueue("before any worker was seen, every name may be right", model="qwne")
    Claims(client.database, "a" * 32).register("host", 1, "qwen2.5-0.5b", None)
    with pytest.raises(UnknownModelError) as caught:
        client.enqueue("prompt", model="qwen-2.5-0.5b")
    assert str(caught.value) == (
        "model: no worker has ever served 'qwen-2.5-0.5b'; known are qwen2.5-0.5b. "
        "Did you mean 'qwen2.5-0.5b'? For a new model, start its worker first: "
        "nightmill worker --model FILE --name qwen-2.5-0.5b"
    )
    assert caught.value.field == "model"
    served = client.enqueue("prompt", model="qwen2.5-0.5b")
    assert [client.get(job_id).model for job_id in (early, served)] == ["qwne", "qwen2.5-0.5b"]


def test_moments_are_kept_in_utc_and_spans_count_from_now(client: Client, clock: Clock) -> None:
    tokyo = timezone(timedelta(hours=9))
    first = client.enqueue(
        "p", deadline=datetime(2026, 1, 2, 9, tzinfo=tokyo), scheduled_at=timedelta(hours=1)
    )
    job = client.get(first)
    assert job.deadline_at == datetime(2026, 1, 2, 0, tzinfo=UTC)
    assert job.deadline_at is not None
    assert job.deadline_at.utcoffset() == timedelta(0)
    assert job.scheduled_at == clock() + timedelta(hours=1)


def test_a_scheduled_job_waits_for_its_time_and_the_sweep(client: Client, clock: Clock) -> None:
    job_id = client.enqueue("prompt", scheduled_at=timedelta(minutes=5))
    claims = Claims(client.database, "a" * 32)
    assert client.broker.queue_length(None) == 0
    assert claims.claim([job_id]) == []
    assert Sweep(claims.database).unsent(10) == []
    clock.advance(minutes=5)
    assert [one.job_ids for one in Sweep(claims.database).unsent(10)] == [[job_id]]
    assert [claim.job_id for claim in claims.claim([job_id])] == [job_id]


def test_a_job_past_its_deadline_is_not_begun_and_says_why(client: Client, clock: Clock) -> None:
    job_id = client.enqueue("prompt", deadline=timedelta(minutes=5))
    claims = Claims(client.database, "a" * 32)
    clock.advance(minutes=5)
    assert claims.claim([job_id]) == []
    assert Sweep(claims.database).expire() == 1
    job = client.get(job_id)
    assert (job.state, job.stop_reason) == ("failed", "deadline")
    assert job.error == "the deadline passed before a worker began"
    again = client.retry(job_id, deadline=timedelta(minutes=1))
    assert again.deadline_at == clock() + timedelta(minutes=1)


# -- cancel and retry ----------------------------------------------------------------------------


def test_a_queued_job_is_cancelled_at_once_and_can_be_retried(client: Client) -> None:
    job_id = client.enqueue("prompt")
    assert client.cancel(job_id) is JobState.CANCELLED
    assert client.cancel(job_id) is JobState.CANCELLED
    assert Claims(client.database, "a" * 32).claim([job_id]) == []
    assert client.retry(job_id).state is JobState.QUEUED
    assert client.broker.queue_length(None) == 2
    with pytest.raises(
        InvalidTransitionError, match=f"job {job_id} is queued: only failed and cancelled jobs"
    ):
        client.retry(job_id)


def test_a_batch_is_cancelled_whole(client: Client) -> None:
    ids = client.enqueue_many(["prompt"] * 5, batch="b")
    other = client.enqueue("prompt", batch="other")
    Claims(client.database, "a" * 32).claim(ids[:2])
    assert client.cancel_batch("b") == (3, 2)
    assert client.stats("b")["state"] == {"running": 2, "cancelled": 3}
    assert client.get(other).state is JobState.QUEUED


@pytest.mark.parametrize("call", ["get", "cancel", "retry", "wait"])
def test_an_id_of_no_job_is_named(sqlite_client: Client, call: str) -> None:
    with pytest.raises(JobNotFoundError, match="there is no job 'nothing'"):
        getattr(sqlite_client, call)("nothing")


def test_jobs_are_listed_newest_first_by_what_is_asked(client: Client) -> None:
    ids = list(client.enqueue_many(["prompt"] * 3, batch="b"))
    client.cancel(ids[1])
    assert [job.id for job in client.list_jobs()] == ids[::-1]
    assert [job.id for job in client.list_jobs(state="cancelled")] == [ids[1]]
    assert [job.id for job in client.list_jobs(batch="b", limit=1)] == [ids[2]]
    assert client.list_jobs(model="m") == []
    with pytest.raises(InvalidParameterError, match="state: 'done' is not one of queued, running, succeeded"):
        client.list_jobs(state="done")
