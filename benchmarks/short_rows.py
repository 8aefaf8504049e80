"""Rows with answers of one token (labels, scores) through one worker that computes nothing: what a row costs.

    python -m benchmarks.short_rows [--rows 20000] [--sqlite] [--texts] [--announced] [--stages] [--repeat 1]

Rows are enqueued first; then the worker starts, with the real engine and scheduler on a runner that draws at
once: one token, which ends the text. Prints JSON: rows a second, and the processor time of each process in
microseconds a row, which others on the machine change little, from the moment that the worker is ready. Redis
and PostgreSQL (fsync on) are of its own.

--texts      prompts are texts, in place of chats
--announced  all rows have their messages from the beginning, as if there were no shares between batches
--stages     the worker's processor time by stage and by thread, too; counting costs a few percent
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import select, update

from benchmarks.common import staged_worker
from benchmarks.common.servers import durable_client
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.jobs import chunked
from nightmill.jobs.sql.tables import JobRow
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker

_SETTLED = 0.05  # share of the rows that is not counted, while all begins


def main() -> None:
    """Enqueue, work, and say what it took."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rows", type=int, default=20_000)
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    arguments.add_argument("--texts", action="store_true", help="texts in place of chats")
    arguments.add_argument("--announced", action="store_true", help="all rows have messages at once")
    arguments.add_argument("--stages", action="store_true", help="by stage and thread of the worker")
    arguments.add_argument("--repeat", type=int, default=1)
    options = arguments.parse_args()
    with durable_client(sqlite=options.sqlite, model=demo_model()) as (client, home):
        for number in range(options.repeat):
            report = measure(client, home, options, f"rows-{number}")
            print(json.dumps(report), flush=True)


def measure(client: Client, home: Path, options: argparse.Namespace, batch: str) -> dict[str, Any]:
    """One batch through one worker."""
    began, spent = time.perf_counter(), time.process_time()
    client.enqueue_many(
        prompts(options.rows, texts=options.texts), batch=batch, max_tokens=8, stop_token_ids=[65]
    )
    enqueued, enqueueing = time.perf_counter() - began, time.process_time() - spent
    if options.announced:
        announce_all(client, batch)
    times = home / "stages.json"
    times.unlink(missing_ok=True)
    os.environ.pop(staged_worker.TIMES, None)
    if options.stages:
        os.environ[staged_worker.TIMES] = str(times)
    with running_worker(client, home / "worker.log", command=staged_worker.COMMAND) as worker:
        least = int(_SETTLED * options.rows)
        before = until(client, batch, least)
        began, first = time.perf_counter(), processors(worker.pid)
        stages_before = read_stages(times)
        done = until(client, batch, options.rows)
        seconds = time.perf_counter() - began
        last = processors(worker.pid)
        time.sleep(0.5 if options.stages else 0.0)
        stages = difference(stages_before, read_stages(times))
    rows = done - before
    per_row = {name: round(1e6 * (last[name] - first.get(name, 0.0)) / rows) for name in last}
    report: dict[str, Any] = {
        "database": "sqlite" if options.sqlite else "postgresql",
        "rows": rows,
        "rows_per_second": round(rows / seconds),
        "microseconds_a_row": per_row,
        "enqueued_per_second": round(options.rows / enqueued),
        "enqueueing_microseconds_a_row": round(1e6 * enqueueing / options.rows),
    }
    for kind, counted in stages.items():
        found = {name: round(1e6 * value / rows, 1) for name, value in counted.items()}
        report[kind] = dict(sorted(found.items(), key=lambda item: -item[1]))
    return report


def until(client: Client, batch: str, rows: int) -> int:
    """Wait until so many rows have ended; returns how many have."""
    while True:
        ended = client.stats(batch)["state"].get("succeeded", 0)
        if ended >= rows:
            return int(ended)
        time.sleep(0.1)


def processors(worker: int) -> dict[str, float]:
    """The processor seconds of the worker, its engine's process, its renderer of chats, and the servers."""
    process = psutil.Process(worker)
    found = {"worker": sum(process.cpu_times()[:2])}
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            name = "engine" if " engine " in command else "other children"
            found[name] = found.get(name, 0.0) + sum(child.cpu_times()[:2])
    mine = psutil.Process()
    for child in mine.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            name = child.name()
            if "redis" in name or "postgres" in name:
                name = "redis" if "redis" in name else "postgresql"
                found[name] = found.get(name, 0.0) + sum(child.cpu_times()[:2])
    return found


def announce_all(client: Client, batch: str) -> None:
    """Give all rows their messages, as before there were shares."""
    with client.database.write() as connection:
        unsent = select(JobRow.id).where(JobRow.batch == batch, JobRow.sent_at.is_(None)).order_by(JobRow.id)
        ids = list(connection.execute(unsent).scalars())
        connection.execute(update(JobRow).where(JobRow.batch == batch).values(sent_at=client.database.now()))
    for chunk in chunked(ids):
        client.broker.announce(list(chunk), None, 0)


def read_stages(file: Path) -> dict[str, dict[str, float]]:
    """The sums that the worker has told last."""
    if not file.exists():
        return {}
    told = json.loads(file.read_text())
    return {kind: told[kind] for kind in ("stages", "threads")}


def difference(
    before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """What was counted in between."""
    return {
        kind: {name: value - before.get(kind, {}).get(name, 0.0) for name, value in counted.items()}
        for kind, counted in after.items()
    }


def prompts(count: int, *, texts: bool) -> Iterator[Any]:
    """Reviews to label, different from one another."""
    for number in range(count):
        text = (
            f"Is this review good or bad? Room {number} was small, but the bed was good and nobody answered."
        )
        yield text if texts else [{"role": "user", "content": text}]


if __name__ == "__main__":
    main()
