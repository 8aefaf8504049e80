"""Claims under competition: each job has exactly one owner, whoever asks and however often."""

import multiprocessing
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import Selection
from nightmill.jobs.sql.sweep import Sweep
from tests.support.servers import Clock

JOBS = 300
SHARD = 64


def _overlapping_shards(ids: list[str]) -> list[list[str]]:
    return [ids[start : start + SHARD] for start in range(0, len(ids), SHARD // 2)]


def _claim_all(database: Database, worker: str, ids: list[str], reverse: bool) -> list[str]:
    """Claim every shard, forwards or backwards; the ids that were won."""
    claims = Claims(database, worker)
    shards = _overlapping_shards(ids)
    if reverse:
        shards = [shard[::-1] for shard in reversed(shards)]
    return [claim.job_id for shard in shards for claim in claims.claim(shard)]


def _claim_in_process(
    settings: Settings, worker: str, ids: list[str], barrier: "threading.Barrier", won: object
) -> None:
    database = Database(settings)
    database.ensure_schema()
    barrier.wait(120)
    won.put(_claim_all(database, worker, ids, reverse=worker.endswith("1")))  # type: ignore[attr-defined]
    database.close()


def test_threads_that_race_for_overlapping_shards_claim_each_job_once(server_settings: Settings) -> None:
    threads = 8
    with Client(server_settings) as client:
        ids = list(client.enqueue_many(f"prompt {n}" for n in range(JOBS)))
        barrier = threading.Barrier(threads)

        def race(number: int) -> list[str]:
            barrier.wait(120)
            return _claim_all(client.database, f"{number:032x}", ids, reverse=number % 2 == 1)

        with ThreadPoolExecutor(threads) as pool:
            won = list(pool.map(race, range(threads)))
        assert Counter(job for one in won for job in one) == Counter(ids)
        owners = {job.id: job.worker for job in client.store.find(_all())}
    assert owners == {job: f"{number:032x}" for number, one in enumerate(won) for job in one}


def test_processes_that_race_for_overlapping_shards_claim_each_job_once(server_settings: Settings) -> None:
    context = multiprocessing.get_context("forkserver")
    with Client(server_settings) as client:
        ids = list(client.enqueue_many(f"prompt {n}" for n in range(JOBS)))
        barrier, won = context.Barrier(2), context.Queue()
        processes = [
            context.Process(target=_claim_in_process, args=(server_settings, f"{n:032x}", ids, barrier, won))
            for n in range(2)
        ]
        for process in processes:
            process.start()
        claimed = [job for _ in processes for job in won.get(timeout=240)]
        for process in processes:
            process.join(120)
        assert Counter(claimed) == Counter(ids)
        assert {job.attempt for job in client.store.find(_all())} == {1}


def test_rescuers_that_race_halve_a_silent_workers_jobs_once(server_settings: Settings, clock: Clock) -> None:
    with Client(server_settings, clock=clock) as client:
        ids = list(client.enqueue_many(["prompt"] * 40))
        dead = Claims(client.database, "d" * 32)
        dead.register("host", 7, "model", None)
        assert len(dead.claim(ids)) == 40
        clock.advance(60)
        barrier = threading.Barrier(4)

        def rescue(number: int) -> list[str]:
            barrier.wait(120)
            return Sweep(client.database).rescue(timedelta(seconds=30))

        with ThreadPoolExecutor(4) as pool:
            rescued = [job for one in pool.map(rescue, range(4)) for job in one]
        assert Counter(rescued) == Counter(ids)
        assert {(job.state, job.failures) for job in client.store.find(_all())} == {(JobState.QUEUED, 0)}
        claims = Claims(client.database, "e" * 32)
        assert [one.job_id for one in claims.claim_suspects((None,), 100)] == sorted(ids)[:20]


def test_sweeps_that_race_announce_each_job_once(server_settings: Settings, clock: Clock) -> None:
    with Client(server_settings, clock=clock) as client:
        ids = list(client.enqueue_many(["prompt"] * 200, scheduled_at=timedelta(seconds=1)))
        clock.advance(2)
        barrier = threading.Barrier(4)

        def sweep(number: int) -> list[str]:
            barrier.wait(120)
            found = Sweep(client.database).unsent(limit=60)
            return [job for one in found for job in one.job_ids]

        with ThreadPoolExecutor(4) as pool:
            announced = [job for one in pool.map(sweep, range(4)) for job in one]
        announced += [job for _ in range(4) for job in sweep_rest(client)]
    assert Counter(announced) == Counter(ids)


def sweep_rest(client: Client) -> list[str]:
    """What a later sweep still finds."""
    return [job for one in Sweep(client.database).unsent(limit=60) for job in one.job_ids]


def test_cancelling_a_batch_while_its_results_are_written_loses_neither(server_settings: Settings) -> None:
    """Two transactions over the same rows, in different orders, take turns rather than block each other."""
    with Client(server_settings) as client:
        ids = list(client.enqueue_many(["prompt"] * 200, batch="b"))
        claims = Claims(client.database, "a" * 32)
        attempts = {claim.job_id: claim.attempt for claim in claims.claim(ids)}
        barrier = threading.Barrier(2)

        def finish() -> int:
            barrier.wait(120)
            return sum(
                claims.finish([_outcome(job, attempts[job]) for job in reversed(ids[start : start + 50])])
                for start in range(0, 200, 50)
            )

        def cancel() -> None:
            barrier.wait(120)
            for _ in range(4):
                client.cancel_batch("b")

        with ThreadPoolExecutor(2) as pool:
            finishing, cancelling = pool.submit(finish), pool.submit(cancel)
            assert finishing.result(240) == 200
            cancelling.result(240)
        assert client.stats("b")["state"] == {"succeeded": 200}


def test_claims_come_in_the_order_of_the_shard_with_all_that_generation_needs(
    client: Client, clock: Clock
) -> None:
    chat = [{"role": "user", "content": "hello"}]
    first = client.enqueue("one", max_tokens=7, seed=11, stop=["x"], deadline=timedelta(hours=1))
    second = client.enqueue(chat, priority=8, seed=12)
    plain, messages = reversed(Claims(client.database, "a" * 32).claim([second, first]))
    assert (plain.job_id, plain.prompt, plain.messages, plain.attempt) == (first, "one", None, 1)
    assert (plain.params.max_tokens, plain.seed, plain.params.stop) == (7, 11, ("x",))
    assert plain.deadline_at == clock() + timedelta(hours=1)
    assert (messages.job_id, messages.prompt, messages.messages) == (second, None, chat)
    assert (messages.priority, messages.seed, messages.deadline_at) == (8, 12, None)


def test_a_message_with_what_are_no_ids_claims_none_but_the_jobs_that_it_names(client: Client) -> None:
    claims = Claims(client.database, "a" * 32)
    claims.register("host", 1, "model", None)
    first, second, third = client.enqueue_many(["a", "b", "c"])
    joined, quoted = f"{first},{second}", f'{first}","{second}'
    for strange in (joined, quoted, f"{{{first}}}", f"{first} ", "", "null", "NULL", "é", "\\", '"'):
        assert claims.claim([strange]) == []
        assert claims.claim([strange, "f" * 32, joined]) == []
    assert [claim.job_id for claim in claims.claim([joined, third])] == [third]
    assert [claim.job_id for claim in claims.claim([second, first])] == [second, first]


def test_a_job_that_ends_early_keeps_its_text_and_says_why(client: Client) -> None:
    claims = Claims(client.database, "a" * 32)
    expected = {
        StopReason.EOS: (JobState.SUCCEEDED, None),
        StopReason.STOP_SEQUENCE: (JobState.SUCCEEDED, None),
        StopReason.LENGTH: (JobState.SUCCEEDED, None),
        StopReason.CONTEXT_FULL: (JobState.SUCCEEDED, None),
        StopReason.CANCELLED: (JobState.CANCELLED, None),
        StopReason.DEADLINE: (JobState.FAILED, "the deadline passed after 4 tokens"),
        StopReason.BUDGET: (JobState.FAILED, "a limit of its batch was met after 4 tokens"),
        StopReason.ERROR: (JobState.FAILED, "it broke"),
    }
    assert expected.keys() == set(StopReason)
    for reason, (state, error) in expected.items():
        job_id = client.enqueue("prompt")
        (claim,) = claims.claim([job_id])
        said = "it broke" if reason is StopReason.ERROR else None
        assert claims.finish([Outcome(job_id, claim.attempt, reason, "so far", 3, 4, said)]) == 1
        job = client.get(job_id)
        assert (job.state, job.stop_reason, job.text, job.error) == (state, reason, "so far", error)
        assert (job.prompt_tokens, job.completion_tokens) == (3, 4)


def test_a_job_whose_attempts_are_spent_is_failed_with_its_whole_history(
    client: Client, clock: Clock
) -> None:
    job_id = client.enqueue("prompt", max_attempts=3)
    for number in range(3):
        claims = Claims(client.database, f"{number:032x}")
        claims.register("host", 40 + number, "model", None)
        claimed = claims.claim([job_id]) or claims.claim_suspects((None,), 10)
        assert [claim.attempt for claim in claimed] == [number + 1]
        clock.advance(60)
        rescued = Sweep(client.database).rescue(timedelta(seconds=30))
        assert rescued == ([job_id] if number < 2 else [])
    job = client.get(job_id)
    assert (job.state, job.stop_reason, job.failures, job.attempt) == (
        JobState.FAILED,
        StopReason.ERROR,
        3,
        3,
    )
    assert job.error is not None
    assert job.error.startswith("all 3 attempts failed; the last: worker 0000")
    assert [(entry["attempt"], entry["worker"]) for entry in job.errors] == [
        (number + 1, f"{number:032x}") for number in range(3)
    ]
    assert all("fell silent: last heartbeat" in entry["error"] for entry in job.errors)
    again = client.retry(job_id)
    assert (again.state, again.failures, len(again.errors)) == (JobState.QUEUED, 0, 3)


def test_handing_back_costs_no_attempt_and_is_announced_anew(client: Client) -> None:
    job_id = client.enqueue("prompt", max_attempts=1)
    claims = Claims(client.database, "a" * 32)
    for attempt in range(1, 6):
        (claim,) = claims.claim([job_id])
        assert claim.attempt == attempt
        assert claims.hand_back([(job_id, attempt)]) == [job_id]
    job = client.get(job_id)
    assert (job.state, job.failures, job.attempt, job.errors) == (JobState.QUEUED, 0, 5, [])
    (announcement,) = Sweep(claims.database).unsent(limit=10)
    assert announcement.job_ids == [job_id]


def test_a_worker_sees_its_running_jobs_and_the_cancellations_among_them(
    client: Client, clock: Clock
) -> None:
    ids = list(client.enqueue_many(["prompt"] * 3))
    ours, others = Claims(client.database, "a" * 32), Claims(client.database, "b" * 32)
    ours.claim(ids[:2])
    others.claim(ids[2:])
    assert ours.running() == {(ids[0], 1): clock(), (ids[1], 1): clock()}
    assert client.cancel(ids[1]) is JobState.RUNNING
    assert client.cancel(ids[2]) is JobState.RUNNING
    assert ours.cancel_requests() == [(ids[1], 1)]
    assert others.cancel_requests() == [(ids[2], 1)]


def test_behind_the_head_of_a_queue_nothing_is_sent_again(client: Client, clock: Clock) -> None:
    lost = client.enqueue("lost", priority=5)
    other = client.enqueue("of a priority at which no message waits", priority=1)
    clock.advance(90)
    heads = {5: list(client.enqueue_many(["at the head"] * 2, priority=5))}
    clock.advance(3600)
    behind = client.enqueue("behind", priority=5)
    clock.advance(3600)
    sweep, minute = Sweep(client.database), timedelta(seconds=60)
    assert [one.job_ids for one in sweep.unanswered(None, minute, 10, heads)] == [[lost], [other]]
    assert sweep.unanswered(None, minute, 10, heads) == []
    for unknown in (["0" * 32], []):
        assert sweep.unanswered(None, minute, 10, {5: unknown, 1: unknown}) == []
    clock.advance(61)
    announced = [one.job_ids for one in sweep.unanswered(None, minute, 10)]
    assert announced == [[*heads[5], behind, lost], [other]]


def test_unanswered_jobs_are_announced_again_for_their_queue_only(client: Client, clock: Clock) -> None:
    old = client.enqueue("prompt")
    for_model = client.enqueue("prompt", model="m")
    clock.advance(61)
    fresh = client.enqueue("prompt")
    claims = Claims(client.database, "a" * 32)
    minute = timedelta(seconds=60)
    assert [one.job_ids for one in Sweep(claims.database).unanswered(None, minute, 10)] == [[old]]
    assert [one.job_ids for one in Sweep(claims.database).unanswered("m", minute, 10)] == [[for_model]]
    assert Sweep(claims.database).unanswered(None, minute, 10) == []
    clock.advance(61)
    assert [one.job_ids for one in Sweep(claims.database).unanswered(None, minute, 10)] == [[old, fresh]]


def test_urgent_jobs_are_swept_first(client: Client, clock: Clock) -> None:
    ids = {
        priority: client.enqueue("prompt", priority=priority, scheduled_at=timedelta(seconds=1))
        for priority in (1, 9, 5)
    }
    clock.advance(2)
    claims = Claims(client.database, "a" * 32)
    swept = [one for _ in range(3) for one in Sweep(claims.database).unsent(limit=1)]
    assert [(one.priority, one.job_ids) for one in swept] == [(9, [ids[9]]), (5, [ids[5]]), (1, [ids[1]])]


def test_only_silent_workers_are_given_up_and_hear_of_it(client: Client, clock: Clock) -> None:
    beating, silent, ended = (Claims(client.database, letter * 32) for letter in "abc")
    for claims in (beating, silent, ended):
        claims.register("host", 1, "model", "a GPU")
    ended.sign_off()
    clock.advance(60)
    assert beating.beat(WorkerState.READY)
    Sweep(beating.database).rescue(timedelta(seconds=30))
    states = {worker.id[0]: worker.state for worker in client.workers()}
    assert states == {"a": "ready", "b": "lost", "c": "stopped"}
    assert not silent.beat(WorkerState.READY), "a worker that was given up must hear of it"
    assert silent.beat(WorkerState.READY), "and it may go on"


@pytest.mark.parametrize("ending", ["lost", "stopped"])
def test_a_job_claimed_by_a_worker_after_its_end_is_rescued_all_the_same(
    client: Client, clock: Clock, ending: str
) -> None:
    job_id = client.enqueue("prompt")
    ended, other = Claims(client.database, "a" * 32), Claims(client.database, "b" * 32)
    ended.register("host", 1, "model", None)
    if ending == "stopped":
        ended.sign_off()
    clock.advance(60)
    if ending == "lost":
        assert Sweep(other.database).rescue(timedelta(seconds=30)) == []
    ended.claim([job_id])
    clock.advance(60)
    assert Sweep(other.database).rescue(timedelta(seconds=30)) == [job_id]


@pytest.mark.parametrize("blame", [False, True])
def test_a_worker_that_is_known_to_be_dead_is_not_waited_for(client: Client, blame: bool) -> None:
    ids = list(client.enqueue_many(["a", "b", "c"], max_attempts=1))
    claims, other = Claims(client.database, "a" * 32), Claims(client.database, "b" * 32)
    for worker in (claims, other):
        worker.register("host", 1, "model", None)
    claims.claim(ids[:2])
    other.claim(ids[2:])
    client.cancel(ids[1])
    assert Sweep(client.database).bury(claims.worker_id, blame=blame) == 2
    first, second, third = (client.get(job_id) for job_id in ids)
    assert (first.state, first.failures, first.errors) == (JobState.QUEUED, 0, [])
    assert sweep_rest(client) == ([] if blame else [first.id])  # a suspect is not announced
    assert second.state is JobState.CANCELLED  # as was asked for while it ran
    assert third.state is JobState.RUNNING
    states = {row.id: row.state for row in client.workers()}
    assert states == {"a" * 32: "lost", "b" * 32: "starting"}


def test_many_jobs_for_later_do_not_hide_one_that_is_due(client: Client, clock: Clock) -> None:
    later = list(client.enqueue_many(["x"] * 20, scheduled_at=timedelta(hours=1), priority=9))
    due = client.enqueue("y", scheduled_at=timedelta(seconds=1), priority=1)
    clock.advance(1)
    assert [item.job_ids for item in Sweep(client.database).unsent(5)] == [[due]]
    clock.advance(hours=1)
    assert [item.job_ids for item in Sweep(client.database).unsent(5)] == [later[:5]]


def test_everything_late_expires_also_where_it_takes_several_transactions(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightmill.jobs.sql.sweep.GROUP", 3)
    client.enqueue_many(["x"] * 10, deadline=timedelta(seconds=1))
    kept = client.enqueue("y", deadline=timedelta(seconds=2))
    clock.advance(1)
    assert Sweep(client.database).expire() == 10
    assert client.get(kept).state is JobState.QUEUED


def _all() -> Selection:
    return Selection()


def _outcome(job_id: str, attempt: int) -> Outcome:
    return Outcome(job_id, attempt, StopReason.EOS, "text", 1, 1)
