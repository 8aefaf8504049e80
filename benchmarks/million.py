"""How long the queries of a night take in a table of 1,000,000 jobs, and which indexes they use.

    python -m benchmarks.million [--rows 1000000] [--sqlite] [--plans]

Fills `jobs` with a batch that is nine tenths done and has rows of every state, beside a batch that is over
and one for later, then times what workers and people ask for. Prints one JSON line a query, with its seconds
(the median of five, and the first), and with --plans the database's own explanation.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Connection, event, insert, text

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.batch_status import BatchRecord
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.dashboard_queries import DashboardQueries, RowFilter
from nightmill.jobs.sql.jobs import JOBS, chunked
from nightmill.jobs.sql.prune import Prune
from nightmill.jobs.sql.sweep import Sweep
from tests.support.servers import start_postgres

LIVE = "tonight"  # the batch that is being worked on: half of all rows
BATCHES = {LIVE: 0.5, "yesterday": 0.3, "later": 0.2}
DONE = 0.9  # of the live batch


def main() -> None:
    """Fill, ask, print."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    arguments.add_argument("--plans", action="store_true", help="print how each statement is executed")
    options = arguments.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="nightmill-bench-")))
        url = None
        if not options.sqlite:
            url = stack.enter_context(start_postgres(durable=True)).create_database()
        settings = Settings(data_dir=home, database_url=url, broker_url="redis://127.0.0.1:1/0")
        client = stack.enter_context(Client(settings))
        client.database.migrate()
        began = time.perf_counter()
        fill(client, options.rows)
        filled = round(time.perf_counter() - began, 1)
        database = "sqlite" if options.sqlite else "postgresql"
        print(json.dumps({"database": database, "rows": options.rows, "fill_seconds": filled}))
        for name, ask in questions(client).items():
            times, plans = measure(client, ask, explain=options.plans)
            first, median = round(times[0], 4), round(statistics.median(times), 4)
            print(json.dumps({"query": name, "seconds": median, "first": first}))
            for line in plans:
                print(f"    {line}")


def fill(client: Client, rows: int) -> None:
    """A table as it is in the middle of a night."""
    now, ids, store = client.database.now(), IdSource(), client.batches.store
    Claims(client.database, "w" * 32).register("host", 1, "model", None)
    for batch, share in BATCHES.items():
        later = now + timedelta(hours=3) if batch == "later" else None
        count = int(rows * share)
        said = {"batch": batch, "model": "model", "scheduled_at": later, "deadline": timedelta(hours=9)}
        defaults = JobSpec.defaults(said | {"max_tokens": 256, "seed": 1})
        store.enter(BatchRecord(batch, "model", now, format="jsonl", row_count=count, scheduled_at=later))
        made = job_rows(batch, count, defaults, now, ids)
        for group in chunked(made, 10_000):
            with client.database.write() as connection:
                connection.execute(insert(JOBS), group)
    with client.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE" if client.database.is_sqlite else "VACUUM ANALYZE jobs"))


def job_rows(
    batch: str, count: int, defaults: JobSpec, now: datetime, ids: IdSource
) -> Iterator[dict[str, Any]]:
    """Rows of one batch, in the states that they have then."""
    blank = dict.fromkeys(
        ("text", "stop_reason", "prompt_tokens", "completion_tokens", "error", "started_at", "finished_at")
    )
    done = {LIVE: int(count * DONE), "yesterday": count, "later": 0}[batch]
    for number in range(1, count + 1):
        prompt = f"Write a haiku about rain, number {number}. " + "It may be long. " * (number % 20)
        row = JobSpec.parse(prompt, defaults).row(ids.draw(), now, 3) | blank
        row |= {"row": number, "custom_id": f"row-{number}", "worker": None}
        if number <= done:
            ended = now - timedelta(seconds=(done - number) / 100)
            row |= {"started_at": ended - timedelta(seconds=2), "finished_at": ended, "worker": "w" * 32}
            row |= {"state": "succeeded", "stop_reason": "eos", "text": "rain on the tin roof " * 20}
            row |= {"prompt_tokens": 40, "completion_tokens": 120}
            if number % 100 == 0:
                row |= {"state": "failed", "stop_reason": "error", "error": f"the prompt has {number} tokens"}
        elif batch == LIVE and number <= done + 256:
            row |= {"state": "running", "worker": "w" * 32, "started_at": now}
        yield row


def questions(client: Client) -> dict[str, Callable[[], object]]:
    """What workers and people ask for."""
    claims, sweep, store = Claims(client.database, "w" * 32), Sweep(client.database), client.batches.store
    live = client.get_batch(LIVE)
    queued = iter([job.id for job in store.in_order(LIVE, [JobState.QUEUED])])

    def claim() -> object:
        return claims.claim([next(queued) for _ in range(64)])

    age = timedelta(hours=1)
    return {
        "claim of 64": claim,
        "running and cancel requests of a worker": lambda: (claims.running(), claims.cancel_requests()),
        "sweep: rescue": lambda: sweep.rescue(age),
        "sweep: expire": sweep.expire,
        "sweep: unsent (200,000 rows for later)": lambda: sweep.unsent(4096),
        "sweep: unanswered": lambda: sweep.unanswered("model", age, 4096),
        "status of the live batch": lambda: live.status(errors=False),
        "status with its errors": live.status,
        "list of batches": lambda: [batch.status(errors=False) for batch in client.list_batches()],
        "the first 5,000 results": lambda: list(islice(live.results(), 5_000)),
        "all errors": lambda: list(live.errors()),
        "rows finished in the last 5 s": lambda: list(
            store.finished_since(LIVE, client.database.now() - timedelta(seconds=5))
        ),
        "prune: what would go": Prune(store, client.database.now() - timedelta(days=30)).count,
        **pages(client),
    }


def pages(client: Client) -> dict[str, Callable[[], object]]:
    """What the page of the night asks for."""
    looking, rows = DashboardQueries(client.database), client.batches.store.get(LIVE).row_count or 0
    now = client.database.now()
    middle = looking.lines(LIVE, RowFilter(), None, rows).after
    for _ in range(100):
        middle = looking.lines(LIVE, RowFilter(), middle, rows).after

    def find(few: int, after: str | None = None, **wanted: Any) -> Callable[[], object]:
        return lambda: looking.lines(LIVE, RowFilter(**wanted), after, few)

    evening = now - timedelta(hours=12)
    return {
        "page: queued and running": looking.waiting,
        "page: ended in 12 hours": lambda: looking.ended(evening),
        "page: tokens of 12 hours": lambda: looking.minutes(evening, now, timedelta(minutes=5)),
        "page: first rows": find(rows),
        "page: rows after the first 5,000": find(rows, middle),
        "page: failed rows": find(rows // 100, state=JobState.FAILED),
        "page: running rows": find(256, state=JobState.RUNNING),
        "page: a custom_id at the end": find(rows, custom_id=f"row-{rows - 1}"),
        "page: a text that is nowhere": find(rows, text="snow"),
    }


def measure(client: Client, ask: Callable[[], object], *, explain: bool) -> tuple[list[float], list[str]]:
    """Seconds of five calls, and the plan of each statement of the last."""
    times = []
    statements: list[tuple[str, Any]] = []

    def note(connection: Connection, cursor: object, statement: str, parameters: Any, *_: object) -> None:
        statements.append((statement, parameters))

    for _ in range(5):
        statements.clear()
        event.listen(client.database.engine, "before_cursor_execute", note)
        began = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began)
        event.remove(client.database.engine, "before_cursor_execute", note)
    return times, list(plans(client, statements)) if explain else []


def plans(client: Client, statements: list[tuple[str, Any]]) -> Iterator[str]:
    """How the database executes them; each kind of statement once."""
    explain = "EXPLAIN QUERY PLAN " if client.database.is_sqlite else "EXPLAIN "
    seen = set()
    for statement, parameters in statements:
        if statement in seen or not statement.startswith(("SELECT", "UPDATE", "DELETE")):
            continue
        seen.add(statement)
        with client.database.engine.connect() as connection:
            yield " ".join(statement.split())[-160:]
            for row in connection.exec_driver_sql(explain + statement, parameters):
                yield f"    {row[-1]}"


if __name__ == "__main__":
    main()
