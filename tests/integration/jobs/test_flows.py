"""The flows of a queue in SQL: who gets messages, in which order, and what is left for later."""

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, select

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.flows import Announcement, Flows
from nightmill.jobs.sql.http_tables import HttpBatchRow
from nightmill.jobs.sql.jobs import mark_unsent
from nightmill.jobs.sql.queue_room import rows_before
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from tests.integration.jobs.batches.rows import jobs_of
from tests.support.servers import Clock


def submit(client: Client, name: str, rows: int, **settings: object) -> Batch:
    prompts = [{"prompt": f"{name} {number}"} for number in range(rows)]
    return client.submit_batch(prompts, name=name, **settings)  # type: ignore[arg-type]


def batches_of(client: Client, sent: list[Announcement]) -> Counter[str | None]:
    return Counter(column_of(client, JobRow.batch, [job_id for one in sent for job_id in one.job_ids]))


def column_of(client: Client, column: Any, ids: list[str]) -> list[Any]:
    with client.database.read() as connection:
        found = dict(map(tuple, connection.execute(select(JobRow.id, column).where(JobRow.id.in_(ids)))))
    return [found[job_id] for job_id in ids]


def sent_ids(client: Client, batch: str | None = None) -> list[str]:
    of_batch = [] if batch is None else [JobRow.batch == batch]
    query = select(JobRow.id).where(JobRow.sent_at.is_not(None), *of_batch)
    with client.database.read() as connection:
        return list(connection.execute(query).scalars())


def test_a_small_batch_comes_in_turn_behind_a_large_one(client: Client, clock: Clock) -> None:
    small_messages = client.settings.model_copy(update={"shard_size": 2})
    with Client(small_messages, clock=clock) as ours:  # 64 messages of 2 rows are a full queue
        large = submit(ours, "large", 400)
        assert ours.broker.queue_length(None) == 16 and len(sent_ids(ours, "large")) == 32
        later = submit(ours, "later", 40, scheduled_at=timedelta(hours=1))
        urgent = submit(ours, "urgent", 40, priority=7)
        clock.advance(1)
        small = submit(ours, "small", 50)
        assert len(sent_ids(ours, "small")) == 32
        flows = Flows(ours.database, {})
        sent = flows.top_up([None, "model"], 2)
        assert [len(one.job_ids) for one in sent[:4]] == [2] * 4 and sent[0].priority == 7
        assert batches_of(ours, sent) == {"urgent": 8, "large": 32, "small": 18}
        first = column_of(ours, JobRow.batch, [one.job_ids[0] for one in sent[4:8]])
        assert first == ["large", "small", "large", "small"]
        assert batches_of(ours, flows.top_up([None], 2)) == {"large": 14}  # the place that `small` left
        assert flows.top_up([None], 2) == []
        assert small.status().rows_before == 40 + 32  # those of `urgent`, and what was sent before it
        assert large.status().rows_before == 40 and urgent.status().rows_before == 0
        assert later.status().rows_before is None
        # Whoever claims makes room, which those have who have rows left.
        claims = Claims(ours.database, "a" * 32)
        claims.register("host", 1, "model", None)
        first = [job.id for job in jobs_of(large).values()][:64]
        assert len(claims.claim(first)) == 64
        assert batches_of(ours, flows.top_up([None], 2)) == {"large": 64}
        clock.advance(hours=1)
        assert batches_of(ours, flows.top_up([None], 2)) == {"later": 38}
        # Nothing is lost if what was taken is never sent: it is found by its age.
        clock.advance(120)
        lost = Sweep(ours.database).unanswered(None, timedelta(seconds=60), 1000)
        assert batches_of(ours, lost) == {"large": 78, "later": 38, "small": 50, "urgent": 40}


def test_owners_share_by_weight_whatever_they_hand_in(client: Client, clock: Clock) -> None:
    small_messages = client.settings.model_copy(update={"shard_size": 2})
    with Client(small_messages, clock=clock) as ours:
        for owner in ("alice", "bob"):
            specs = [JobSpec.parse(f"{owner} {number}") for number in range(300)]
            ours.enqueueing.enqueue_request(specs, owner=owner)
        ours.enqueue_many(f"nobody's {number}" for number in range(300))
        claims = Claims(ours.database, "a" * 32)
        claims.register("host", 1, "model", None)
        flows = Flows(ours.database, {"alice": 2})
        served: Counter[str | None] = Counter()
        waiting = sent_ids(ours)
        for _ in range(6):
            served.update(prompt.split()[0] for prompt in column_of(ours, JobRow.prompt, waiting))
            claims.claim(waiting)
            waiting = [job_id for one in flows.top_up([None], 2) for job_id in one.job_ids]
        assert served["alice"] == 300 and 150 <= served["bob"] < 300 and 150 <= served["nobody's"] < 300


def test_batches_over_http_belong_to_their_owner(client: Client) -> None:
    flows = Flows(client.database, {})
    now = client.database.now()
    with client.database.write() as connection:
        for name in ("1" * 32, "2" * 32):
            connection.execute(
                HttpBatchRow.__table__.insert().values(
                    id=name, owner="alice", input_file="f", metadata={}, settings={}, status="in_progress",
                    errors=[], created_at=now,
                )
            )  # fmt: skip
    for name in ("batch_" + "1" * 32, "batch_" + "2" * 32, "mine"):
        submit(client, name, 20)
    with client.database.write() as connection:
        found, standings = flows._standings(connection, [None], 5, now)[None]
    assert {flow.batch: standing.owner for flow, standing in zip(found, standings, strict=True)} == {
        "batch_" + "1" * 32: "alice",
        "batch_" + "2" * 32: "alice",
        "mine": None,
    }


def test_the_rest_of_a_retried_batch_waits_for_its_turn(client: Client, tmp_path: Path, clock: Clock) -> None:
    small_messages = client.settings.model_copy(update={"shard_size": 1})
    with Client(small_messages, clock=clock) as ours:
        batch = submit(ours, "night", 60)
        batch.cancel()
        assert batch.retry_failed() == 60
        assert len(sent_ids(ours, "night")) == 16
        assert batches_of(ours, Flows(ours.database, {}).top_up([None], 1)) == {"night": 44}


def test_sqlite_reads_no_rows_of_a_large_batch_but_those_that_it_needs(sqlite_settings: Settings) -> None:
    plans: dict[str, str] = {}

    def explain(connection: Connection, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement.startswith(("SELECT", "WITH")) and "FROM jobs" in statement:
            plan = connection.connection.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans[statement] = "\n".join(line[-1] for line in plan)

    with Client(sqlite_settings) as client:
        batch = submit(client, "large", 4)
        event.listen(client.database.engine, "before_cursor_execute", explain)
        submit(client, "next", 4)  # counts messages
        mark_unsent(client.database, list(client.enqueue_many(["a", "b"], batch="due")))
        Flows(client.database, {}).top_up([None], 64)
        rows_before(client.database, "large")
        assert batch.status(errors=False).held == 0
    counts = [plan for statement, plan in plans.items() if "SELECT count(*)" in statement]
    assert len(counts) >= 5 and not any("SCAN jobs" in plan for plan in plans.values())
    of_flows = [plan for plan in counts if "ix_jobs_flows" in plan]
    assert of_flows and all("sent_at>?" in plan for plan in of_flows)
    assert any("ix_jobs_held" in plan for plan in counts)
    due = [plan for statement, plan in plans.items() if "jobs.suspects IS NULL" in statement]
    assert due and all("ix_jobs_flows_of_batches" in plan and "TEMP B-TREE" not in plan for plan in due)
