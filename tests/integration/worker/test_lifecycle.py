"""Workers as processes: killed, drained, cancelled, side by side.

Most are tried on one database: that the SQL of claims, ends and hand-backs does the same on both is for
`tests/integration/jobs`, and workers are killed and drained on both by the campaign.
"""

import json
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import CallFormat, JobState, Markup, StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.job import Job
from tests.integration.worker.conftest import QUICK, SLOW, StartWorker, on_postgresql, on_sqlite
from tests.support.ggufs import write_model
from tests.support.servers import ENDLESS_TOKENS, LONG_TOKENS, wait_until

# Work that can be interrupted. A finished long job fills its limit; the demo model's context is 512.
LONG: dict[str, Any] = {"max_tokens": LONG_TOKENS, "ignore_eos": True, "temperature": 0.8}
ENDLESS = LONG | {"max_tokens": ENDLESS_TOKENS}
PATIENCE = 120.0


def in_state(client: Client, state: JobState) -> list[Job]:
    return client.list_jobs(state=state, limit=1000)


def running_attempt(client: Client, job_id: str) -> int | None:
    job = client.get(job_id)
    return job.attempt if job.state is JobState.RUNNING else None


@on_sqlite
def test_a_worker_answers_with_reasons_what_is_queued_lost_due_expired_or_impossible(
    jobs_client: Client, start_worker: StartWorker
) -> None:
    """One start for all: none of these jobs is another's business."""
    lost = jobs_client.enqueue_many(["Count from 1 to 3"] * 3, max_tokens=2)
    with jobs_client.broker.connection() as connection:
        connection.default_channel.client.flushall()  # their messages
    plain = jobs_client.enqueue("Write a haiku about rain", max_tokens=3, temperature=0)
    chat = jobs_client.enqueue([{"role": "user", "content": "Write a haiku about rain"}], temperature=0)
    too_long = jobs_client.enqueue("word " * 2000)
    with start_worker("a"):
        expired = jobs_client.enqueue(
            "Write a haiku about fire", deadline=timedelta(seconds=0.3), scheduled_at=timedelta(hours=1)
        )
        due = jobs_client.enqueue("Count from 1 to 3", max_tokens=2, scheduled_at=timedelta(seconds=1))
        later = jobs_client.enqueue_many(["Count from 1 to 5"] * 70, max_tokens=4, temperature=0)
        ids = [*lost, plain, chat, too_long, expired, due, *later]
        jobs_client.wait(ids, timeout=PATIENCE)
    jobs = {job.id: job for job in jobs_client.results(ids)}
    assert {jobs[job_id].attempt for job_id in lost} == {1}
    cut, answered, failed = jobs[plain], jobs[chat], jobs[too_long]
    assert (cut.state, cut.stop_reason, cut.completion_tokens) == (JobState.SUCCEEDED, StopReason.LENGTH, 3)
    assert (answered.state, answered.stop_reason) == (JobState.SUCCEEDED, StopReason.EOS)
    assert answered.text and "<|" not in answered.text
    assert answered.attempt == 1 and answered.error is None and answered.prompt_tokens
    assert len({jobs[job_id].text for job_id in later}) == 1  # a bad one costs no other job anything
    assert {jobs[job_id].state for job_id in later} == {JobState.SUCCEEDED}
    assert (failed.state, failed.stop_reason, failed.attempt) == (JobState.FAILED, StopReason.ERROR, 1)
    assert failed.error is not None
    assert "this worker's context holds 512" in failed.error and "shorten it" in failed.error
    _due_and_expired(jobs[due], jobs[expired])
    assert [worker.state for worker in jobs_client.workers()] == ["stopped"]


def _due_and_expired(due: Job, expired: Job) -> None:
    """They begin when they are due, or not at all."""
    assert (expired.state, expired.stop_reason) == (JobState.FAILED, StopReason.DEADLINE)
    assert expired.error == "the deadline passed before a worker began"
    assert due.state is JobState.SUCCEEDED
    assert due.started_at is not None and due.scheduled_at is not None
    assert due.started_at >= due.scheduled_at


@on_postgresql
def test_killed_worker_loses_no_job_and_repeats_none(jobs_client: Client, start_worker: StartWorker) -> None:
    ids = jobs_client.enqueue_many(["Write a haiku about the sea"] * 16, **LONG)
    with start_worker("doomed", "--max-sequences", "8", command=SLOW) as doomed:
        wait_until(lambda: len(in_state(jobs_client, JobState.RUNNING)) >= 8, PATIENCE)
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        struck = {job.id for job in in_state(jobs_client, JobState.RUNNING)}
    assert struck
    with start_worker("rescuer", command=QUICK):
        jobs_client.wait(ids, timeout=PATIENCE)
    for job in jobs_client.results(ids):
        assert (job.state, job.stop_reason) == (JobState.SUCCEEDED, StopReason.LENGTH)
        assert job.completion_tokens == LONG["max_tokens"]
        if job.id in struck:
            assert (job.attempt, job.failures, job.errors) == (2, 0, [])  # it may have been any of them
        else:
            assert (job.attempt, job.failures, job.errors) == (1, 0, [])


@pytest.mark.slow  # tests/integration/jobs/test_suspects.py counts its attempts
@on_postgresql
def test_job_that_kills_every_worker_ends_failed_with_its_history(
    jobs_client: Client, start_worker: StartWorker
) -> None:
    job_id = jobs_client.enqueue("Write a haiku about the moon", max_attempts=2, **ENDLESS)
    for attempt in (1, 2):
        with start_worker(f"doomed-{attempt}", command=SLOW) as process:
            wait_until(lambda: running_attempt(jobs_client, job_id) == attempt, PATIENCE)  # noqa: B023
            process.send_signal(signal.SIGKILL)
            process.wait()
    with start_worker("third"):
        jobs_client.wait(job_id, timeout=PATIENCE)
    job = jobs_client.get(job_id)
    assert (job.state, job.stop_reason) == (JobState.FAILED, StopReason.ERROR)
    assert (job.attempt, job.failures, len(job.errors)) == (2, 2, 2)
    assert job.error is not None and job.error.startswith("all 2 attempts failed; the last: worker")


@on_sqlite
def test_late_and_cancelled_jobs_keep_their_text_and_sigterm_hands_others_back_with_no_attempt_lost(
    jobs_client: Client, start_worker: StartWorker
) -> None:
    short = jobs_client.enqueue("Write a haiku about snow", max_tokens=2, temperature=0)
    with start_worker("leaving", "--max-sequences", "2", command=SLOW, drain_seconds=0.3) as leaving:
        wait_until(lambda: jobs_client.get(short).state.final, PATIENCE)
        _late(jobs_client)
        # Only now: of two shards that wait, either may be claimed first.
        ids = jobs_client.enqueue_many(["Write a haiku about snow"] * 12, **LONG)
        wait_until(lambda: in_state(jobs_client, JobState.RUNNING), PATIENCE)
        _cancelled(jobs_client)
        leaving.send_signal(signal.SIGTERM)
        assert leaving.wait(timeout=240) == 0
    assert in_state(jobs_client, JobState.RUNNING) == []
    left = in_state(jobs_client, JobState.QUEUED)
    assert left and all(job.failures == 0 and job.errors == [] for job in left)
    with start_worker("next", command=QUICK):
        jobs_client.wait(ids, timeout=PATIENCE)
    finished = list(jobs_client.results([job.id for job in left]))
    assert {job.state for job in finished} == {JobState.SUCCEEDED}
    assert all(job.failures == 0 for job in finished)
    assert {job.attempt for job in finished} <= {1, 2}


@pytest.mark.slow
@on_sqlite
def test_a_second_ctrl_c_hands_everything_back_at_once(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    ids = jobs_client.enqueue_many(["Write a haiku about snow"] * 3, **ENDLESS)
    with start_worker("hurried", command=SLOW, drain_seconds=3600.0) as hurried:
        wait_until(lambda: in_state(jobs_client, JobState.RUNNING), PATIENCE)
        hurried.send_signal(signal.SIGINT)
        wait_until(lambda: jobs_client.workers()[0].state == "draining", PATIENCE)
        hurried.send_signal(signal.SIGINT)
        assert hurried.wait(timeout=PATIENCE) == 1  # as Celery's workers do after Ctrl-C
    said = (tmp_path / "hurried.log").read_text()
    assert "Traceback" not in said and "unfinished jobs were handed back" in said
    assert [job.failures for job in in_state(jobs_client, JobState.QUEUED)] == [0] * len(ids)
    assert [worker.state for worker in jobs_client.workers()] == ["stopped"]


def _late(client: Client) -> None:
    """A job stops at its deadline, with its text; on a busy machine it has begun long before."""
    job_id = client.enqueue("Write a haiku about fire", deadline=timedelta(seconds=5), **LONG)
    client.wait(job_id, timeout=PATIENCE)
    late = client.get(job_id)
    assert (late.state, late.stop_reason) == (JobState.FAILED, StopReason.DEADLINE)
    assert late.error is not None and late.error.startswith("the deadline passed after")
    assert late.text


def _cancelled(client: Client) -> None:
    """A queued job and a running one, which has some text, are cancelled."""
    running, queued = in_state(client, JobState.RUNNING)[0].id, in_state(client, JobState.QUEUED)[0].id
    seen = next(iter(client.stream(running, timeout=PATIENCE)))
    assert client.cancel(queued) is client.get(queued).state is JobState.CANCELLED
    assert client.cancel(running) is JobState.RUNNING
    stopped = wait_until(lambda: (job := client.get(running)).state.final and job, PATIENCE)
    assert (stopped.state, stopped.stop_reason) == (JobState.CANCELLED, StopReason.CANCELLED)
    assert seen and stopped.text is not None and stopped.text.startswith(seen)
    assert stopped.completion_tokens is not None and 0 < stopped.completion_tokens < LONG_TOKENS


@pytest.mark.slow  # tests/integration/jobs/test_claims.py claims shards twice, in processes that race
@on_postgresql
def test_redelivered_shard_runs_nothing_twice(jobs_client: Client, start_worker: StartWorker) -> None:
    ids = list(jobs_client.enqueue_many(["Count from 1 to 3"] * 20, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        jobs_client.broker.announce(ids, None, 5)
    with start_worker("a", "--max-sequences", "4"), start_worker("b", "--max-sequences", "4"):
        jobs_client.wait(ids, timeout=PATIENCE)
        wait_until(lambda: jobs_client.broker.queue_length(None) == 0, PATIENCE)
    finished = list(jobs_client.results(ids))
    assert {job.attempt for job in finished} == {1}
    assert {job.completion_tokens for job in finished} == {40}


HERMES = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>{% endfor %}<|im_start|>assistant: "
)
WET = {"properties": {"wet": {"type": "boolean"}}, "required": ["wet"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WET}}]


@on_sqlite
def test_rows_of_a_file_may_name_different_models_and_call_their_tools(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "Rain?"}]
    called = [
        *chat,
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "wet"},
    ]
    rows: list[dict[str, Any]] = [
        {"custom_id": "alpha", "prompt": "Count from 1 to 3", "model": "alpha", "max_tokens": 2},
        {"custom_id": "any", "prompt": "Count from 1 to 3", "max_tokens": 2},
        {"custom_id": "plain", "messages": called, "model": "beta", "max_tokens": 3},
        {"custom_id": "ignorant", "messages": chat, "model": "alpha", "tools": TOOLS},
        *(
            {"custom_id": f"call {n}", "messages": called, "model": "beta", "tools": TOOLS, "seed": n,
             "tool_choice": "required" if n % 2 else "weather", "max_tokens": 250}
            for n in range(4)
        ),
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_model(tmp_path / "beta.gguf", chat_template=HERMES, context_length=1024)
    with start_worker("a", "--name", "alpha"), start_worker("b", "--name", "beta", model=model):
        batch = jobs_client.submit_batch(path, name="models")
        batch.wait()
        serves = {worker.id: worker.model for worker in jobs_client.workers()}
        with pytest.raises(ValueError, match=r"no worker has ever served 'alhpa'.*Did you mean 'alpha'"):
            jobs_client.enqueue("x", model="alhpa")
    done = {job.custom_id: job for job in batch.results()}
    assert {name: serves[job.worker or ""] for name, job in done.items() if name != "any"} == {
        "alpha": "alpha", "plain": "beta", **{f"call {n}": "beta" for n in range(4)}
    }  # fmt: skip
    (ignorant,) = batch.errors()
    assert "--tool-format json" in (ignorant.error or "")
    calls = [done[f"call {n}"] for n in range(4)]
    assert any(job.stop_reason is StopReason.EOS for job in calls)
    for job in (one for one in calls if one.stop_reason is StopReason.EOS):
        assert job.content == "" and job.markup == Markup(CallFormat.HERMES)
        assert {call.name for call in job.tool_calls} == {"weather"}
        assert all(call.parsed.keys() == {"wet"} for call in job.tool_calls)
