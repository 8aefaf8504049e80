"""Rows that follow rows: held until the row before them has ended, filled once, and ended with it."""

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import func, or_, select, text, update

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchConflictError, InvalidParameterError, InvalidTransitionError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from tests.integration.jobs.batches.rows import jobs_of
from tests.support.servers import Clock, worker_env

ROWS: list[dict[str, Any]] = [
    {"id": 1, "review": "fine"},
    {"id": 2, "review": "poor"},
    {"id": 3, "review": "so so"},
]
RATE = "Rate {{ review }}:\n{{ prior.content }}"


@pytest.fixture
def client(server_settings: Settings, clock: Clock) -> Iterator[Client]:
    with Client(server_settings, clock=clock) as made:
        yield made


@pytest.fixture
def worker(client: Client) -> Claims:
    return registered(client, "a")


def registered(client: Client, letter: str) -> Claims:
    claims = Claims(client.database, letter * 32)
    claims.register("host", 1, "model", None)
    return claims


def ask(client: Client, **more: Any) -> Batch:
    return client.submit_batch(ROWS, name="drafts", template="Write: {{ review }}", column="draft", **more)


def follow(
    client: Client, after: str = "drafts", name: str = "judged", template: str = RATE, **more: Any
) -> Batch:
    return client.submit_batch(after=after, name=name, template=template, **more)


def finish(worker: Claims, jobs: list[Job], said: str = "draft {row}", **more: Any) -> int:
    claims = worker.claim([job.id for job in jobs])
    rows = {job.id: job.row for job in jobs}
    values: dict[str, Any] = {"stop_reason": StopReason.EOS} | more
    return worker.finish(
        [
            Outcome(
                claim.job_id,
                claim.attempt,
                values["stop_reason"],
                said.format(row=rows[claim.job_id]),
                3,
                5,
                error=values.get("error"),
            )
            for claim in claims
        ]
    )


def rows_of(batch: Batch) -> list[Job]:
    return [job for _, job in sorted(jobs_of(batch).items())]


def states(batch: Batch) -> list[str]:
    return [str(job.state) + (" held" if job.held else "") for job in rows_of(batch)]


def test_a_chain_of_three_waits_and_each_row_takes_the_answer_before(
    client: Client, worker: Claims, tmp_path: Path
) -> None:
    drafts = ask(client, system="Short.")
    judged = follow(client, choice=["1", "5"], column="rating")
    third = follow(client, "judged", "third", "{{ prior.messages }}Of {{ draft }}, rated {{ rating }}: why?")
    assert states(judged) == states(third) == ["queued held"] * 3
    assert (judged.status().held, drafts.status().held) == (3, 0)
    assert worker.claim([job.id for job in rows_of(judged) + rows_of(third)]) == []
    assert {row for item in Sweep(client.database).unsent(9) for row in item.job_ids} == set()
    first, second, last = rows_of(drafts)
    finish(worker, [second])
    assert worker.followers_due.is_set()
    assert states(judged) == ["queued held", "queued", "queued held"]
    (filled,) = [job for job in rows_of(judged) if not job.held]
    assert filled.messages == [{"role": "user", "content": "Rate poor:\ndraft 2"}]
    assert (filled.prior, filled.scheduled_at) == (second.id, None)
    (announced,) = Sweep(client.database).unsent(9)
    assert announced.job_ids == [filled.id]
    finish(worker, [first, last])
    assert judged.status().held == 0
    finish(worker, rows_of(judged), "5")
    assert rows_of(third)[0].messages == [
        {"role": "user", "content": "Rate fine:\ndraft 1"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Of draft 1, rated 5: why?"},
    ]
    finish(worker, rows_of(third), "because")
    third.write_results(tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    kept = ("id", "review", "draft", "rating", "answer")
    assert [rows[1][name] for name in kept] == [2, "poor", "draft 2", "5", "because"]


def test_a_row_whose_prior_fails_ends_with_a_code_of_its_own_and_so_do_those_behind_it(
    client: Client, worker: Claims, tmp_path: Path
) -> None:
    drafts = ask(client)
    judged, third = follow(client), follow(client, "judged", "third")
    one, two, _three = rows_of(drafts)
    finish(worker, [one], stop_reason=StopReason.ERROR, error="it broke")
    client.cancel(two.id)
    assert states(judged) == states(third) == ["failed", "cancelled", "queued held"]
    assert [job.errors[-1]["code"] for job in rows_of(third)[:2]] == ["prior_failed", "prior_cancelled"]
    assert "row-1, failed (error): it broke" in str(rows_of(judged)[0].error)
    judged.write_errors(tmp_path / "errors.jsonl")
    written = [json.loads(line) for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert [(line["code"], line["id"]) for line in written] == [("prior_failed", 1), ("prior_cancelled", 2)]
    drafts.cancel()
    assert states(third) == ["failed", "cancelled", "cancelled"]


def test_retrying_the_first_rows_holds_those_again_that_ended_with_them(
    client: Client, worker: Claims
) -> None:
    drafts = ask(client)
    judged, third = follow(client), follow(client, "judged", "third")
    client.cancel(rows_of(judged)[1].id)  # somebody's wish, which a retry of others does not overrule
    finish(worker, rows_of(drafts), stop_reason=StopReason.ERROR, error="it broke")
    assert states(judged) == states(third) == ["failed", "cancelled", "failed"]
    client.retry(rows_of(drafts)[0].id)
    assert states(judged) == states(third) == ["queued held", "cancelled", "failed"]
    assert drafts.retry(temperature=0.5).rows == 2
    assert states(judged) == states(third) == ["queued held", "cancelled", "queued held"]
    assert worker.claim([job.id for job in rows_of(judged)]) == []
    finish(worker, rows_of(drafts))
    assert states(judged) == ["queued", "cancelled", "queued"]
    assert judged.retry_failed() == 1  # its prior has ended well meanwhile
    assert states(judged)[1] == "queued held"
    assert Sweep(client.database).settle_followers() == 1
    assert rows_of(judged)[1].messages == [{"role": "user", "content": "Rate poor:\ndraft 2"}]


def test_a_zombie_fills_nothing_and_nothing_is_filled_twice(client: Client, worker: Claims) -> None:
    drafts = ask(client)
    judged = follow(client)
    jobs = rows_of(drafts)
    zombies = worker.claim([job.id for job in jobs])
    worker.hand_back([(claim.job_id, claim.attempt) for claim in zombies[:2]])
    late = [Outcome(claim.job_id, claim.attempt, StopReason.EOS, "late", 3, 5) for claim in zombies]
    finish(registered(client, "b"), jobs[:1])
    assert worker.finish(late) == 1
    assert states(judged) == ["queued", "queued held", "queued"]
    assert [job.messages[0]["content"] for job in rows_of(judged) if job.messages] == [
        "Rate fine:\ndraft 1",
        "Rate so so:\nlate",
    ]
    before = rows_of(judged)
    assert Sweep(client.database).settle_followers() == 0
    assert worker.finish(late) == 0
    assert rows_of(judged) == before


def test_the_sweep_settles_what_a_worker_of_an_older_version_ended(client: Client) -> None:
    drafts = ask(client)
    judged, third = follow(client), follow(client, "judged", "third")
    first, second, gone = rows_of(drafts)
    sweep = Sweep(client.database)
    assert sweep.settle_followers() == 0
    with client.database.read() as connection:  # what they claimed and announced: it is not due
        due = or_(JobRow.scheduled_at.is_(None), JobRow.scheduled_at <= client.database.now())
        query = select(func.count()).select_from(JobRow).where(JobRow.state == JobState.QUEUED, due)
        assert connection.execute(query).scalar_one() == 3
    ends = {"finished_at": client.database.now()}
    with client.database.write() as connection:  # as it did: the row alone
        ended = {"state": JobState.SUCCEEDED, "stop_reason": StopReason.EOS, "text": "old"} | ends
        connection.execute(update(JobRow).where(JobRow.id == first.id).values(ended))
        failed = {"state": JobState.FAILED, "stop_reason": StopReason.ERROR, "error": "no"} | ends
        connection.execute(update(JobRow).where(JobRow.id == second.id).values(failed))
        connection.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": gone.id})
    assert sweep.settle_followers() == 1
    assert states(judged) == ["queued", "failed", "failed"]
    assert states(third) == ["queued held", "failed", "failed"]
    assert "has been deleted" in str(rows_of(judged)[2].error)
    assert {row for item in sweep.unsent(9) for row in item.job_ids} == {rows_of(judged)[0].id}


def test_rows_that_follow_what_has_ended_are_due_at_once(client: Client, worker: Claims) -> None:
    drafts = ask(client)
    finish(worker, rows_of(drafts)[:2])
    judged = follow(client)
    assert states(judged) == ["queued", "queued", "queued held"]
    assert Sweep(client.database).unsent(9) == []  # they were announced like others
    again = follow(client)  # the same batch, entered once
    assert (again.name, again.status().rows) == ("judged", 3)
    with pytest.raises(BatchConflictError, match="other settings"):
        follow(client, template="{{ prior.text }}")


def test_a_deadline_ends_a_row_that_waits_and_those_behind_it(
    client: Client, worker: Claims, clock: Clock
) -> None:
    drafts = ask(client)
    judged = follow(client, deadline=timedelta(seconds=60), priority=7)
    third = follow(client, "judged", "third")
    clock.advance(seconds=61)
    assert Sweep(client.database).expire() == 3
    assert {str(job.stop_reason) for job in rows_of(judged)} == {"deadline"}
    assert states(third) == ["failed"] * 3
    finish(worker, rows_of(drafts))
    assert states(judged) == ["failed"] * 3
    with pytest.raises(InvalidTransitionError):
        follow(client, "drafts", "fourth").delete()


def test_rows_begin_when_their_batch_does_and_not_before(
    client: Client, worker: Claims, clock: Clock
) -> None:
    drafts = ask(client)
    judged = follow(client, scheduled_at=timedelta(hours=1))
    finish(worker, rows_of(drafts))
    assert not any(job.held for job in rows_of(judged))
    assert worker.claim([job.id for job in rows_of(judged)]) == []
    clock.advance(hours=1, seconds=1)
    assert len(worker.claim([job.id for job in rows_of(judged)])) == 3


def test_rows_of_a_file_follow_others_of_it(client: Client, worker: Claims, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"custom_id": "a", "messages": [{"role": "user", "content": "Draft."}]},
        {"custom_id": "b", "after": "a", "prompt": 'Rate "{{ prior.content }}" {1}', "max_tokens": 3},
        {
            "custom_id": "c",
            "after": "a",
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "{{ prior.messages }} Shorter."},
            ],
        },
        {"custom_id": "d", "after": "e", "prompt": "{{ prior.text }}"},
        {"custom_id": "e", "after": "e", "prompt": "{{ prior.text }}"},
        {"custom_id": "f", "after": "a", "prompt": "{{ review }}"},
        {"custom_id": "g", "after": "a", "prompt": "{{ prior.reasoning }}"},
        {"custom_id": "h", "after": "b", "prompt": "{{ prior.parsed.score }}"},
        {"prompt": "{{ prior.text }}"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = client.submit_batch(path, name="rows")
    by_id = {job.custom_id: job for job in rows_of(batch)}
    assert [job.custom_id for job in rows_of(batch) if job.state is JobState.FAILED] == ["d", "e", "f"]
    assert "no row before this one has the custom_id 'e'" in str(by_id["d"].error)
    assert "no row before this one has the custom_id 'e'" in str(by_id["e"].error)
    assert "{{ review }} stands for nothing" in str(by_id["f"].error)
    assert by_id["row-9"].prompt == "{{ prior.text }}"  # it follows nothing, so that it is no template
    said = "{{ prior.text }} <|im_start|>system"
    finish(worker, [by_id["a"]], said.replace("{", "{{").replace("}", "}}"))
    by_id = {job.custom_id: job for job in rows_of(batch)}
    assert by_id["b"].prompt == f'Rate "{said}" {{1}}'
    assert by_id["b"].params.max_tokens == 3
    assert by_id["c"].messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Draft."},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Shorter."},
    ]
    assert by_id["g"].errors[-1]["code"] == "missing_field"
    finish(worker, [by_id["b"]])
    (h,) = [job for job in rows_of(batch) if job.custom_id == "h"]
    assert (h.state, h.errors[-1]["field"]) == (JobState.FAILED, "prior.parsed.score")


def test_rows_of_csv_and_of_python_follow_others(client: Client, worker: Claims, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('custom_id,after,prompt\na,,Once\nb,a,"{{ prior.text }}, then"\n')
    batch = client.submit_batch(tmp_path / "rows.csv", name="csv")
    finish(worker, rows_of(batch)[:1])
    assert rows_of(batch)[1].prompt == "draft 1, then"
    items = (
        {"custom_id": str(n), "prompt": f"{n}{{{{ prior.text }}}}", "after": str(n - 1)}
        for n in range(1, 400)
    )
    many = client.submit_batch([{"custom_id": "0", "prompt": "x"}, *items], name="many")
    jobs = rows_of(many)
    assert [job.prior for job in jobs] == [None, *(job.id for job in jobs[:-1])]
    client.cancel(jobs[0].id)  # and all behind it, one by one
    assert many.status().states[JobState.CANCELLED] == 400


def test_parsed_answers_and_their_keys_are_substituted(client: Client, worker: Claims) -> None:
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
    drafts = ask(client, json_schema=schema)
    template = "{{ prior.parsed.score }} of {{ prior.parsed | json }}{{ prior.reasoning }}"
    judged = follow(client, template=template, plain=True, empty="keep", reuse="any")
    finish(worker, rows_of(drafts), '{{"score": {row}}}')
    jobs = rows_of(judged)
    assert [job.prompt for job in jobs] == [f'{n} of {{"score": {n}}}' for n in (1, 2, 3)]
    with client.database.read() as connection:
        query = text("SELECT count(DISTINCT content_key) FROM jobs WHERE batch = 'judged'")
        assert connection.execute(query).scalar_one() == 3


def test_what_cannot_follow_is_refused_with_the_way_out(client: Client, tmp_path: Path) -> None:
    ask(client)
    client.enqueue("x", batch="grows")
    with pytest.raises(BatchConflictError, match="'grows' was filled by enqueue"):
        follow(client, "grows")
    with pytest.raises(InvalidParameterError, match=r"there is no prior\.txt; there are prior\.text, "):
        follow(client, template="{{ prior.txt }}")
    with pytest.raises(InvalidParameterError, match="no column 'reviews'; there are 'id', 'review', 'draft'"):
        follow(client, template="{{ reviews }}")
    with pytest.raises(InvalidParameterError, match="after: needs a template"):
        client.submit_batch(after="drafts")
    with pytest.raises(InvalidParameterError, match="leave out the file"):
        client.submit_batch(ROWS, after="drafts", template="x {{ prior.text }}")
    with pytest.raises(InvalidParameterError, match="column: 'review' is a column of the table already"):
        client.submit_batch(after="drafts", template="{{ prior.text }}", column="review")
    with pytest.raises(InvalidParameterError, match="submitted with after"):
        client.submit_batch(ROWS, template="{{ prior.text }}")
    with pytest.raises(InvalidParameterError, match="source: is missing"):
        client.submit_batch(name="nothing")


@pytest.mark.parametrize("round_", range(3))
def test_no_row_is_overlooked_while_its_prior_ends(server_settings: Settings, round_: int) -> None:
    with Client(server_settings) as client, Client(server_settings) as other:
        rows = [{"x": str(n)} for n in range(600)]
        drafts = client.submit_batch(rows, name="drafts", template="{{ x }}")
        worker = registered(other, "a")
        ids = [job.id for job in rows_of(drafts)]
        barrier = threading.Barrier(2)

        def work() -> None:
            barrier.wait(30)
            for at in range(0, len(ids), 20):
                claims = worker.claim(ids[at : at + 20])
                worker.finish([Outcome(one.job_id, one.attempt, StopReason.EOS, "t", 1, 1) for one in claims])

        thread = threading.Thread(target=work)
        thread.start()
        barrier.wait(30)
        judged = follow(client, template="{{ prior.text }}")
        thread.join()
        assert judged.status().held == 0
        assert states(judged) == ["queued"] * 600


def test_the_command_line_submits_and_shows_rows_that_wait(
    client: Client, server_settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in worker_env(server_settings).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments)

    ask(client)
    submit = ("batch", "submit", "--after", "drafts", "--template", RATE)
    done = run(*submit, "--choice", "1", "--choice", "5", "--json")
    assert done.exit_code == 0, done.output
    name = json.loads(done.stdout)["name"]
    assert name.startswith("drafts-") and json.loads(done.stdout)["held"] == 3
    assert json.loads(run(*submit, "--choice", "1", "--choice", "5", "--json").stdout)["name"] == name
    assert "waits      3 rows for the rows that they follow" in run("batch", "status", name).output
    job = rows_of(client.get_batch(name))[0]
    shown = run("show", job.id).output
    assert job.prior is not None and job.prior in shown and "held" in shown
    assert "held" not in run("show", job.prior).output
    (tmp_path / "rows.csv").write_text("review\nx\n")
    for wrong in ([str(tmp_path / "rows.csv")], ["--format", "csv"], ["--query", "SELECT 1", "--from", "x"]):
        refused = run(*submit, *wrong)
        assert (refused.exit_code, "--after stands in place of" in refused.output) == (2, True)
    unknown = run("batch", "submit", "--after", "nothing", "--template", "{{ prior.text }}")
    assert unknown.exit_code == 1 and "there is no batch 'nothing'" in unknown.output


def test_rows_behind_a_batch_that_a_limit_stopped_wait_again_once_it_goes_on(
    client: Client, worker: Claims
) -> None:
    drafts = ask(client, budget="5-tokens")
    judged = follow(client)
    finish(worker, rows_of(drafts)[:1])
    assert Sweep(client.database).end_stopped() == 2
    assert states(judged) == ["queued", "failed", "failed"]
    assert rows_of(judged)[1].errors[-1]["code"] == "prior_failed"
    drafts.set_limits(budget="none")
    assert states(drafts) == ["succeeded", "queued", "queued"]
    assert states(judged) == ["queued", "queued held", "queued held"]
