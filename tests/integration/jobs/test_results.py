"""Waiting and results: every finished job exactly once, in the order that was asked for."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from nightmill import jobs
from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import (
    BatchNotFoundError,
    InvalidParameterError,
    JobNotFoundError,
    WaitTimeoutError,
)
from nightmill.jobs.reply.batch_status import BatchState
from nightmill.jobs.sql.claims import Claims, Outcome
from tests.support.servers import Clock, worker_env


def _finish(client: Client, ids: list[str], reason: StopReason = StopReason.EOS) -> None:
    claims = Claims(client.database, "a" * 32)
    claims.finish(
        [
            Outcome(claim.job_id, claim.attempt, reason, f"text of {claim.prompt}", 2, 3)
            for claim in claims.claim(ids)
        ]
    )


@pytest.fixture
def finished_elsewhere(server_settings: Settings) -> Iterator[Any]:
    """Call it with ids: another client finishes them, a few at a time, from a thread."""
    threads = []

    def start(shards: list[list[str]]) -> None:
        def finish() -> None:
            with Client(server_settings) as other:
                for shard in shards:
                    _finish(other, shard)

        thread = threading.Thread(target=finish)
        threads.append(thread)
        thread.start()

    yield start
    for thread in threads:
        thread.join(120)


def test_results_come_in_the_order_of_enqueueing_or_of_finishing(client: Client, clock: Clock) -> None:
    ids = list(client.enqueue_many(["a", "b", "c"], batch="b"))
    for job_id in (ids[2], ids[0], ids[1]):
        clock.advance(1)
        _finish(client, [job_id])
    assert [job.id for job in client.results(ids)] == ids
    assert [job.id for job in client.results(batch="b")] == ids
    assert [job.id for job in client.results(ids[::-1])] == ids[::-1]
    by_end = [ids[2], ids[0], ids[1]]
    assert [job.id for job in client.results(ids, order="finished")] == by_end
    assert [job.id for job in client.results(batch="b", order="finished")] == by_end
    assert [job.text for job in client.results(ids)] == ["text of a", "text of b", "text of c"]


def test_results_without_waiting_leave_out_what_is_not_final(client: Client) -> None:
    ids = list(client.enqueue_many(["a", "b", "c", "d"], batch="b"))
    _finish(client, [ids[1]])
    client.cancel(ids[3])
    for order in ("enqueued", "finished"):
        for chosen in ({"jobs": ids}, {"batch": "b"}):
            found = client.results(**chosen, order=order, wait=False)
            assert {job.id: job.state for job in found} == {
                ids[1]: JobState.SUCCEEDED,
                ids[3]: JobState.CANCELLED,
            }


@pytest.mark.parametrize("order", ["enqueued", "finished"])
def test_each_result_comes_once_while_another_client_finishes_jobs(
    server_settings: Settings, finished_elsewhere: Any, order: Any
) -> None:
    with Client(server_settings) as client:
        ids = list(client.enqueue_many([f"{n}" for n in range(1200)], batch="b"))
        shuffled = [ids[start::40] for start in range(40)]
        finished_elsewhere(shuffled)
        found = [job.id for job in client.results(batch="b", order=order, timeout=240)]
    assert sorted(found) == ids
    assert order == "finished" or found == ids


def test_results_of_ids_span_many_pages(client: Client) -> None:
    ids = client.enqueue_many([f"{n}" for n in range(1200)])
    _finish(client, list(ids)[:600])
    _finish(client, list(ids)[600:])
    assert [job.id for job in client.results(ids)] == list(ids)
    assert sorted(job.id for job in client.results(ids, order="finished")) == list(ids)
    client.wait(ids, timeout=0)


def test_a_batch_is_read_on_as_it_grows(client: Client) -> None:
    first = client.enqueue("a", batch="b")
    _finish(client, [first])
    results = client.results(batch="b", timeout=120)
    assert next(results).id == first
    second = client.enqueue("b", batch="b")
    _finish(client, [second])
    assert [job.id for job in results] == [second]


def test_jobs_of_a_transaction_that_commits_late_come_at_the_end(postgres_settings: Settings) -> None:
    """They have smaller ids than jobs that were read already."""
    with Client(postgres_settings) as client, Session(client.database.engine) as session:
        first = client.enqueue("first", batch="b")
        late = list(client.enqueue_many(["late"] * 700, batch="b", session=session))
        later = list(client.enqueue_many(["later"] * 700, batch="b"))
        _finish(client, [first, *later])
        results = client.results(batch="b", timeout=120)
        read = [next(results).id for _ in range(701)]
        session.commit()
        _finish(client, late)
        read += [job.id for job in results]
    assert read == [first, *later, *late]


def test_a_batch_that_is_pruned_while_it_is_read_ends(client: Client) -> None:
    ids = list(client.enqueue_many(["prompt"] * 3, batch="b"))
    _finish(client, ids)
    results = client.results(batch="b")
    assert next(results).id == ids[0]
    assert client.get_batch("b").delete() == 3
    assert [job.id for job in results] == ids[1:]


def test_a_batch_without_jobs_has_no_results_and_one_that_is_not_there_is_an_error(client: Client) -> None:
    assert len(client.enqueue_many([], batch="nothing", model="m")) == 0
    assert list(client.results(batch="nothing")) == []
    assert list(client.results(batch="nothing", order="finished")) == []
    client.wait(batch="nothing", timeout=0)
    assert client.get_batch("nothing").status().state is BatchState.COMPLETED
    assert sum(client.stats("nothing")["state"].values()) == 0 and client.cancel_batch("nothing") == (0, 0)
    first = client.enqueue("a", batch="nothing")
    assert len(client.enqueue_many([], batch="nothing")) == 0
    _finish(client, [first])
    assert [job.id for job in client.results(batch="nothing")] == [first]
    reads: list[Callable[[str], object]] = [
        lambda name: list(client.results(batch=name, wait=False)),
        lambda name: next(client.results(batch=name, order="finished")),
        lambda name: client.wait(batch=name),
        client.stats,
        client.get_batch,
    ]
    for read in reads:
        for name in ("nothng", "not"):
            with pytest.raises(
                BatchNotFoundError, match=f"there is no batch '{name}': did you mean 'nothing'"
            ):
                read(name)
        with pytest.raises(BatchNotFoundError, match=r"there is no batch 'x{300}': `nightmill batch list`"):
            read("x" * 300)
    assert client.list_jobs(batch="nothng") == []  # a search
    assert client.cancel_batch("nothng") == (0, 0)  # as programs do before they enqueue anew


def test_a_batch_is_there_with_the_transaction_that_names_it_first(client: Client) -> None:
    for prompts in ([], ["a"]):
        with Session(client.database.engine) as session:
            client.enqueue_many(prompts, batch=f"of-{len(prompts)}", session=session)
            session.rollback()
            with pytest.raises(BatchNotFoundError):
                client.stats(f"of-{len(prompts)}")
            client.enqueue_many(prompts, batch=f"of-{len(prompts)}", session=session)
            session.commit()
        assert len(list(client.results(batch=f"of-{len(prompts)}", wait=False))) == 0


def test_wait_returns_when_all_are_final(server_settings: Settings, finished_elsewhere: Any) -> None:
    with Client(server_settings) as client:
        ids = list(client.enqueue_many(["prompt"] * 30, batch="b"))
        finished_elsewhere([ids[:10], ids[10:29]])
        client.cancel(ids[29])
        client.wait(ids, timeout=240)
        client.wait(batch="b", timeout=0)
        client.wait(ids[0], timeout=0)
        assert client.stats("b")["state"] == {"succeeded": 29, "cancelled": 1}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (1, "1 job is not finished in the time given; it goes on"),
        (3, "3 jobs are not finished in the time given; they go on"),
    ],
)
def test_waiting_too_long_is_a_timeout_that_counts_what_is_left(
    client: Client, number: int, said: str
) -> None:
    ids = list(client.enqueue_many(["prompt"] * (number + 1)))
    _finish(client, ids[:1])
    with pytest.raises(WaitTimeoutError, match=f"^{said}$") as caught:
        client.wait(ids, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    for order in ("enqueued", "finished"):
        results = client.results(ids, order=order, timeout=0.05)
        with pytest.raises(WaitTimeoutError, match=said):
            list(results)


def test_finished_jobs_come_before_the_timeout_of_the_others(client: Client) -> None:
    ids = list(client.enqueue_many(["prompt"] * 3))
    _finish(client, ids[1:2])
    results = client.results(ids, order="finished", timeout=0.05)
    assert next(results).id == ids[1]
    with pytest.raises(WaitTimeoutError, match="2 jobs are not finished"):
        next(results)


def test_an_unknown_id_is_named_and_not_waited_for(client: Client) -> None:
    ids = [client.enqueue("prompt"), "f" * 32]
    for call in (client.wait, client.results, lambda ids: client.results(ids, order="finished")):
        with pytest.raises(JobNotFoundError, match=f"there is no job '{'f' * 32}'"):
            list(call(ids) or ())


def test_what_to_wait_for_must_be_said_once(client: Client) -> None:
    for arguments in ({}, {"jobs": ["0" * 32], "batch": "b"}):
        with pytest.raises(InvalidParameterError, match="name either jobs or a batch"):
            client.wait(**arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="order: must be 'enqueued' or 'finished'"):
        client.results([], order="random")  # type: ignore[arg-type]


def test_stats_count_states_reasons_and_tokens_of_all_or_one_batch(client: Client) -> None:
    ids = list(client.enqueue_many(["prompt"] * 4, batch="b"))
    other = client.enqueue("prompt")
    _finish(client, ids[:2])
    _finish(client, [other], StopReason.LENGTH)
    client.cancel(ids[3])
    assert client.stats("b") == {
        "state": {"succeeded": 2, "queued": 1, "cancelled": 1},
        "stop_reason": {"eos": 2, "cancelled": 1},
        "prompt_tokens": 4,
        "completion_tokens": 6,
    }
    assert client.stats()["stop_reason"] == {"eos": 2, "cancelled": 1, "length": 1}
    client.enqueue_many([], batch="nothing")
    assert client.stats("nothing") == {
        "state": {},
        "stop_reason": {},
        "prompt_tokens": 0,
        "completion_tokens": 0,
    }


def test_the_module_functions_use_one_client_of_the_environment(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in worker_env(settings).items():
        if name.startswith("NIGHTMILL_"):
            monkeypatch.setenv(name, value)
    job_id = jobs.enqueue("one", batch="b")
    ids = jobs.enqueue_many(["two", "three"], batch="b", seed=7)
    assert jobs.get(job_id).state is jobs.JobState.QUEUED
    assert jobs.cancel(job_id) is jobs.JobState.CANCELLED
    assert jobs.retry(job_id).state is jobs.JobState.QUEUED
    assert jobs.cancel_batch("b") == (3, 0)
    jobs.wait([job_id, *ids], timeout=0)
    assert [job.prompt for job in jobs.results(batch="b")] == ["one", "two", "three"]
    assert [job.id for job in jobs.list_jobs(batch="b")] == [*reversed(ids), job_id]
    assert jobs.stats("b")["state"] == {"cancelled": 3}
    assert jobs.default_client().settings.broker_url == settings.broker_url
    assert set(jobs.__all__) <= set(dir(jobs))
