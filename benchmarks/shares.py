"""Shares of a queue: what a look at its flows costs, in processor time and statements.

    python -m benchmarks.shares [--sqlite] [--flows 1 10 1000] [--looks 40]

Each flow is a batch with rows left. Its queue is filled; then looks come that find nothing to send, and looks
after rows were taken, which send that many. Prints a line of JSON for each number of flows: milliseconds of a
look, and microseconds of a row that a look marks as sent. It is this process's processor time, which others
on the machine change little, SQLite's included and PostgreSQL's not. Nothing is sent to Redis.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import event, select, update

from benchmarks.common.servers import durable_client
from nightmill.jobs.base.shares import QUEUE_MESSAGES
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.flows import Flows
from nightmill.jobs.sql.tables import QUEUED, JobRow

SHARD = 64
_TAKEN = 16 * SHARD  # rows between two looks


def main() -> None:
    """Measure for each number of flows."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    arguments.add_argument("--flows", type=int, nargs="+", default=[1, 10, 1000])
    arguments.add_argument("--looks", type=int, default=40, help="of each kind")
    options = arguments.parse_args()
    for flows in options.flows:
        with durable_client(sqlite=options.sqlite) as (client, _):
            report = measure(client, flows, options.looks)
            print(
                json.dumps({"database": "sqlite" if options.sqlite else "postgresql", **report}), flush=True
            )


def measure(client: Client, flows: int, looks: int) -> dict[str, Any]:
    """Looks at so many flows."""
    rows = (looks * _TAKEN + 2 * QUEUE_MESSAGES * SHARD) // flows
    for flow in range(flows):
        client.enqueue_many((f"row {row}" for row in range(rows)), batch=f"batch {flow}")
    shares = Flows(client.database, {})
    while shares.top_up((None,), SHARD):
        pass
    statements = [0]
    event.listen(client.database.engine, "before_cursor_execute", lambda *_: statements.append(1))
    looking = spent(lambda: [shares.top_up((None, "model"), SHARD) for _ in range(looks)])
    per_look = (len(statements) - 1) / looks
    marked, sending = 0, 0.0
    for _ in range(looks):
        take(client)
        found: list[Any] = []
        sending += spent(lambda found=found: found.extend(shares.top_up((None, "model"), SHARD)))
        marked += sum(len(message.job_ids) for message in found)
    return {
        "flows": flows,
        "statements of a look": round(per_look, 1),
        "ms of a look": round(1e3 * looking / looks, 2),
        "us of a row": round(1e6 * (sending - looking) / max(1, marked), 2),
    }


def take(client: Client) -> None:
    """End the rows whose messages were sent first, as workers would."""
    with client.database.write() as connection:
        sent = select(JobRow.id).where(QUEUED, JobRow.sent_at.is_not(None)).order_by(JobRow.sent_at)
        ids = list(connection.execute(sent.limit(_TAKEN)).scalars())
        connection.execute(update(JobRow).where(JobRow.id.in_(ids)).values(state="succeeded"))


def spent(work: Callable[[], object]) -> float:
    """Processor seconds of this process in some work."""
    before = time.process_time()
    work()
    return time.process_time() - before


if __name__ == "__main__":
    main()
