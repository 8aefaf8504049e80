"""A fault at every call between claim and write: one job of 64 fails, or another worker does them all."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

import nightmill.worker.service.requesting
from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseRefusedError, NightmillError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claimed import _parsed
from nightmill.jobs.sql.claims import Claim, Outcome
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from nightmill.worker.assembly.model import load_model
from nightmill.worker.engine.request import Completion, Request
from tests.support.ggufs import write_model
from tests.support.servers import Clock, wait_until
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.bench import PROMPT, Bench, enqueue, stop

ODD = "nobody expected \x00 this"
Patch = pytest.MonkeyPatch


def odd() -> Exception:
    return ZeroDivisionError(ODD)


def unreadable_row(bench: Bench, victim: str, patch: Patch) -> None:
    with bench.client.database.write() as connection:
        connection.execute(
            update(JobRow).where(JobRow.id == victim).values(params={"max_tokens": 3, "foo": 1})
        )


def in_claim(bench: Bench, victim: str, patch: Patch) -> None:
    claim = bench.claims.claim_within

    def faulty(job_ids: Sequence[str], *room: int) -> tuple[list[Claim], dict[str, int]]:
        if victim in job_ids:
            raise odd()
        return claim(job_ids, *room)

    patch.setattr(bench.claims, "claim_within", faulty)


def refused_claim(bench: Bench, victim: str, patch: Patch) -> None:
    claim = bench.claims.claim_within

    def faulty(job_ids: Sequence[str], *room: int) -> tuple[list[Claim], dict[str, int]]:
        if victim in job_ids:
            raise DatabaseRefusedError("integer out of range")
        return claim(job_ids, *room)

    patch.setattr(bench.claims, "claim_within", faulty)


def in_reading(bench: Bench, victim: str, patch: Patch) -> None:
    _parsed.cache_clear()  # which may know these parameters from another test
    fail_once(GenerationParams, "parse", patch)


def in_fill(bench: Bench, victim: str, patch: Patch) -> None:
    """After its work: else the end of the worker would wait for the claim that seems under way."""
    fill = bench.service.in_flight.fill

    def faulty(*arguments: Any, **keywords: Any) -> None:
        patch.undo()
        fill(*arguments, **keywords)
        raise odd()

    patch.setattr(bench.service.in_flight, "fill", faulty)


def in_tokenizer(bench: Bench, victim: str, patch: Patch) -> None:
    encode = bench.prompting.encode

    def faulty(claim: Claim) -> Any:
        if claim.job_id == victim:
            raise odd()
        return encode(claim)

    patch.setattr(bench.prompting, "encode", faulty)


def too_few_answers(bench: Bench, victim: str, patch: Patch) -> None:
    tokenize = bench.prompting.tokenize_all

    def faulty(claims: Sequence[Claim]) -> Any:
        return [
            prompt for claim, prompt in zip(claims, tokenize(claims), strict=True) if claim.job_id != victim
        ]

    patch.setattr(bench.prompting, "tokenize_all", faulty)


def in_request(bench: Bench, victim: str, patch: Patch) -> None:
    def faulty(**fields: Any) -> Request:
        if fields["job_id"] == victim:
            raise odd()
        return Request(**fields)

    patch.setattr(nightmill.worker.service.requesting, "Request", faulty)


def in_fingerprint(bench: Bench, victim: str, patch: Patch) -> None:
    fail_once(nightmill.worker.service.requesting, "marks", patch)


def in_submit(bench: Bench, victim: str, patch: Patch) -> None:
    submit = bench.service.engine.submit

    def faulty(requests: Sequence[Request]) -> None:
        if any(request.job_id == victim for request in requests):
            raise odd()
        submit(requests)

    patch.setattr(bench.service.engine, "submit", faulty)


def in_completion(bench: Bench, victim: str, patch: Patch) -> None:
    taken = bench.service.engine._on_completion

    def faulty(completion: Completion) -> None:
        if completion.job_id == victim:
            raise odd()
        taken(completion)

    patch.setattr(bench.service.engine, "_on_completion", faulty)


def in_put(bench: Bench, victim: str, patch: Patch) -> None:
    put = bench.service._writer.put

    def faulty(outcome: Outcome) -> None:
        if outcome.job_id == victim:
            raise odd()
        put(outcome)

    patch.setattr(bench.service._writer, "put", faulty)


def in_finish(bench: Bench, victim: str, patch: Patch) -> None:
    finish = bench.claims.finish

    def faulty(outcomes: Sequence[Outcome]) -> int:
        if any(outcome.job_id == victim for outcome in outcomes):
            raise odd()
        return finish(outcomes)

    patch.setattr(bench.service._writer, "_write", faulty)


def refused_result(bench: Bench, victim: str, patch: Patch) -> None:
    finish = bench.claims.finish

    def faulty(outcomes: Sequence[Outcome]) -> int:
        if any(outcome.job_id == victim and outcome.error is None for outcome in outcomes):
            raise DatabaseRefusedError(ODD)
        return finish(outcomes)

    patch.setattr(bench.service._writer, "_write", faulty)


def refused_failure(bench: Bench, victim: str, patch: Patch) -> None:
    finish = bench.claims.finish

    def faulty(outcomes: Sequence[Outcome]) -> int:
        if any(outcome.job_id == victim for outcome in outcomes):
            raise DatabaseRefusedError(ODD)
        return finish(outcomes)

    patch.setattr(bench.service._writer, "_write", faulty)


def after_writing(bench: Bench, victim: str, patch: Patch) -> None:
    fail_once(bench.service._writer, "_on_written", patch)


def in_wait(bench: Bench, victim: str, patch: Patch) -> None:
    fail_once(bench.service.in_flight, "wait_for_end", patch)


def fail_once(owner: Any, name: str, patch: Patch) -> None:
    method, failed = getattr(owner, name), []

    def faulty(*arguments: Any) -> Any:
        if not failed:
            failed.append(1)
            raise odd()
        return method(*arguments)

    patch.setattr(owner, name, faulty)


ONE_FAILS = [
    unreadable_row, in_reading, in_claim, refused_claim, in_tokenizer, too_few_answers, in_request,
    in_fingerprint, in_submit, refused_result,
]  # fmt: skip
WORKER_ENDS = [in_fill, in_completion, in_put, in_finish, after_writing, in_wait]


@pytest.mark.parametrize("fault", ONE_FAILS, ids=lambda fault: fault.__name__)
def test_what_one_job_cannot_give_costs_that_job_alone(
    build: Callable[..., Bench], monkeypatch: Patch, fault: Callable[..., None]
) -> None:
    bench = build(ScriptedRunner(slots=16, kv_pages=256), capacity=64)
    ids = enqueue(bench.client, 64, max_tokens=3)
    fault(bench, ids[17], monkeypatch)
    bench.service.run_shard(ids)
    assert bench.fatal == []
    assert bench.client.stats()["state"] == {"succeeded": 63, "failed": 1}
    (failed,) = bench.client.list_jobs(state=JobState.FAILED)
    assert failed.error
    if fault not in (in_fingerprint, in_reading):  # they hit any one
        assert failed.id == ids[17]
    if fault is unreadable_row:
        assert failed.error.startswith("params: foo: unknown parameter; known are max_tokens, ")
        assert failed.error.endswith("upgrade the worker, then retry the job")
    elif fault not in (refused_claim, too_few_answers, refused_result):
        assert "ZeroDivisionError: nobody expected \ufffd this" in failed.error
    if fault not in (in_claim, refused_claim):  # those were never claimed: there is no attempt to record
        assert [entry["error"] for entry in failed.errors] == [failed.error]
    assert bench.client.retry(failed.id).state is JobState.QUEUED


@pytest.mark.parametrize("params", ["{broken", "[3]", '{"n": "x"}', '{"n": 2.0}', '{"n": 500}', '{"n": [1]}'])
def test_a_row_whose_parameters_are_none_fails_alone(build: Callable[..., Bench], params: str) -> None:
    bench = build(ScriptedRunner(slots=16, kv_pages=256), capacity=64)
    ids = [*enqueue(bench.client, 8, max_tokens=3), *enqueue(bench.client, 2, max_tokens=3, n=2)]
    with bench.client.database.write() as connection:
        connection.execute(text("UPDATE jobs SET params = :p WHERE id = :id"), {"p": params, "id": ids[3]})
    bench.service.run_shard(ids)
    assert bench.fatal == []
    assert bench.client.stats()["state"] == {"succeeded": 9, "failed": 1}
    failed = bench.client.get(ids[3])
    assert failed.error is not None and failed.error.startswith("params: ")


def test_a_failure_that_is_refused_too_is_charged_and_holds_up_nobody(
    build: Callable[..., Bench], monkeypatch: Patch
) -> None:
    bench = build(ScriptedRunner(slots=16, kv_pages=256), capacity=64)
    ids = enqueue(bench.client, 64, max_tokens=3, max_attempts=2)
    refused_failure(bench, ids[17], monkeypatch)
    bench.service.run_shard(ids)
    assert bench.client.stats()["state"] == {"succeeded": 63, "queued": 1}
    bench.suspects.look()
    job = bench.client.get(ids[17])
    assert (job.state, job.failures, bench.fatal) == (JobState.FAILED, 2, [])
    assert job.error is not None
    assert job.error.startswith("all 2 attempts failed; the last: the result could not be stored: nobody")


@pytest.mark.parametrize("fault", WORKER_ENDS, ids=lambda fault: fault.__name__)
def test_a_broken_thread_ends_the_worker_and_another_does_its_work(
    build: Callable[..., Bench], monkeypatch: Patch, clock: Clock, fault: Callable[..., None]
) -> None:
    bench = build(ScriptedRunner(slots=16, kv_pages=256), capacity=64)
    ids = enqueue(bench.client, 64, max_tokens=3)
    fault(bench, ids[17], monkeypatch)
    bench.run(ids).join(120)
    wait_until(lambda: bench.fatal)
    assert "ZeroDivisionError: nobody expected" in bench.fatal[0]
    bench.service.drain()  # as Celery has it do then
    clock.advance(60)
    Sweep(bench.client.database).rescue(timedelta(seconds=30))  # finds what it held without knowing it
    second = build(ScriptedRunner(slots=16, kv_pages=256), capacity=64, name="b")
    second.suspects.look()
    second.service.run_shard(ids)
    assert bench.client.stats()["state"] == {"succeeded": 64}
    assert {job.failures for job in bench.client.results(ids)} == {0}


@pytest.mark.parametrize("server_settings", ["postgresql"], indirect=True)
def test_an_error_text_that_sql_cannot_hold_stops_no_result(
    server_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template may say anything; SQL text cannot hold NUL."""
    path = write_model(tmp_path / "m.gguf", layers=1, chat_template="{{ raise_exception('bad' ~ '%c' % 0) }}")
    model = load_model(Settings(model=path))
    with Client(server_settings) as client:
        bench = Bench(client, ScriptedRunner())
        monkeypatch.setattr(
            bench.prompting,
            "tokenize_all",
            lambda claims: [
                answer if isinstance(answer, NightmillError) else PROMPT
                for answer in model.tokenize_all(claims)
            ],
        )
        chat = client.enqueue([{"role": "user", "content": "hi"}])
        ids = enqueue(client, 3, max_tokens=3)
        bench.service.run_shard([chat, *ids])
        failed = client.get(chat)
        assert (failed.state, bench.fatal) == (JobState.FAILED, [])
        assert failed.error is not None and "bad\ufffd" in failed.error
        assert {job.state for job in client.results(ids)} == {JobState.SUCCEEDED}
        stop(bench)
