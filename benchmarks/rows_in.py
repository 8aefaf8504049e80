"""What a table of 1,000,000 rows or more costs the client: entered, followed, and written out again.

    python -m benchmarks.rows_in [--rows 1000000] [--worked 20000] [--postgresql] [--after] [--parquet]
        [--seconds 600]

Writes a table of reviews, and measures each command as a process of its own: its seconds, its processor time,
and the most memory that it had resident. `batch submit` enters the table by a template; with --after a second
batch follows each of its rows. A worker with the instant engine computes --worked rows, which says how long
all would take; the others are ended in SQL, so that `batch results` has all of them to write: as CSV, and as
Parquet shards. Prints a JSON line for each.

With --seconds the worker has so much time for as many rows as it can, and results are of these alone, as
Parquet shards: the run for a table that is too large to be ended in one statement.
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow
from pyarrow import parquet
from sqlalchemy import func, select, update

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.tables import JobRow
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from tests.support import instant_worker
from tests.support.servers import start_postgres, start_redis, worker_env

_NIGHTMILL = (sys.executable, "-c", "from nightmill.jobs.commands.main import main; main()")
_WORDS = ("the", "room", "was", "small", "but", "the", "bed", "was", "good", "and", "nobody", "answered")
_COLUMNS = ("id", "review", "rating")
_ROW_GROUP = 100_000
_LOOK_SECONDS, _SAY_SECONDS = 20.0, 120.0  # counting millions of rows takes time of the database's own


def main() -> None:
    """Write, submit, work, read."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--worked", type=int, default=20_000, help="rows that the instant engine computes")
    arguments.add_argument("--postgresql", action="store_true", help="PostgreSQL in place of SQLite")
    arguments.add_argument("--after", action="store_true", help="also a batch that follows this one")
    arguments.add_argument("--parquet", action="store_true", help="the table as Parquet in place of CSV")
    arguments.add_argument("--seconds", type=float, help="time of the worker; results are what it computed")
    options = arguments.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="nightmill-bench-")))
        redis = stack.enter_context(start_redis(home))
        url = None
        if options.postgresql:
            url = stack.enter_context(start_postgres(durable=True)).create_database()
        settings = Settings(data_dir=home, database_url=url, broker_url=redis.url, model=demo_model())
        client = stack.enter_context(Client(settings))
        client.database.migrate()
        table = home / ("reviews.parquet" if options.parquet else "reviews.csv")
        size = (write_parquet if options.parquet else write_table)(table, options.rows)
        say("table", rows=options.rows, mebibytes=size >> 20)
        submit = [str(table), "--template", "Good or bad? {{ review }}", "--column", "label"]
        measured(
            "batch submit", settings, ["submit", "--name", "reviews", *submit, "--max-tokens", "8"], options
        )
        if options.after:
            follow = ["--after", "reviews", "--template", "Why? {{ prior.content }}", "--max-tokens", "8"]
            measured("batch submit --after", settings, ["submit", "--name", "reasons", *follow], options)
        if options.seconds is None:
            work(client, home, options.worked, options.rows)
            end_the_rest(client)
        else:
            work(client, home, options.rows, options.rows, options.seconds)
            options.rows = ended(client)
        out, shards = home / "out.csv", home / "shards"
        if options.seconds is None:
            measured("batch results", settings, ["results", "reviews", "-o", str(out)], options)
            with out.open(newline="") as file:
                assert sum(1 for _ in csv.reader(file)) == options.rows + 1
        measured("batch results, Parquet", settings, ["results", "reviews", "-o", f"{shards}/"], options)
        files = sorted(shards.iterdir())
        written = sum(parquet.ParquetFile(file).metadata.num_rows for file in files)
        say("shards", files=len(files), rows=written)
        assert written == options.rows


def reviews(rows: int) -> Iterator[tuple[int, str, int]]:
    """The rows of the table."""
    for number in range(rows):
        words = " ".join(_WORDS[(number + place) % len(_WORDS)] for place in range(8 + number % 24))
        yield number, words, number % 5


def write_table(path: Path, rows: int) -> int:
    """Write a table of reviews; returns its size in bytes."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows(reviews(rows))
    return path.stat().st_size


def write_parquet(path: Path, rows: int) -> int:
    """Write the same table as Parquet; returns its size in bytes."""
    schema = pyarrow.schema(zip(_COLUMNS, (pyarrow.int64(), pyarrow.string(), pyarrow.int64()), strict=True))
    remaining = reviews(rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while group := list(islice(remaining, _ROW_GROUP)):
            writer.write_table(pyarrow.table(list(zip(*group, strict=True)), schema=schema))
    return path.stat().st_size


def measured(what: str, settings: Settings, arguments: Sequence[str], options: Any) -> None:
    """Run a command of `nightmill batch`, and print its time and memory."""
    command = [*_NIGHTMILL, "batch", *arguments]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=worker_env(settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    rate = round(options.rows / seconds)
    spent = round(1e6 * (usage.ru_utime + usage.ru_stime) / options.rows, 1)
    say(
        what,
        seconds=round(seconds, 1),
        rows_per_second=rate,
        processor_microseconds_a_row=spent,
        mebibytes=usage.ru_maxrss >> 10,
    )


def work(client: Client, home: Path, rows: int, most: int, limit: float = math.inf) -> None:
    """Let the instant engine compute so many rows, or for `limit` seconds, and print its pace."""
    if not rows:
        return
    with running_worker(client, home / "instant.log", command=instant_worker.COMMAND) as worker:
        began, before = time.perf_counter(), ended(client)
        said = began
        while (done := ended(client)) < min(before + rows, most) and time.perf_counter() - began < limit:
            time.sleep(0.5 if limit == math.inf else _LOOK_SECONDS)
            if time.perf_counter() - said > _SAY_SECONDS:
                said = time.perf_counter()
                say("so far", rows=done - before, seconds=round(said - began), mebibytes=peaks(worker.pid))
        seconds, most_memory = time.perf_counter() - began, peaks(worker.pid)
    say(
        "instant engine",
        rows=done - before,
        seconds=round(seconds, 1),
        rows_per_second=round((done - before) / seconds),
        mebibytes=most_memory,
    )


def peaks(worker: int) -> dict[str, int]:
    """The most memory that the worker and each of its processes have had resident, in MiB."""
    found: dict[str, int] = {}
    process = psutil.Process(worker)
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, OSError, StopIteration):
            lines = Path(f"/proc/{one.pid}/status").read_text().splitlines()
            peak = next(line for line in lines if line.startswith("VmHWM:"))
            name = "worker" if one is process else "engine" if "engine" in one.cmdline() else "renderer"
            found[name] = max(found.get(name, 0), int(peak.split()[1]) >> 10)
    return found


def ended(client: Client) -> int:
    """The number of rows that have succeeded."""
    condition = (JobRow.batch == "reviews", JobRow.state == JobState.SUCCEEDED)
    with client.database.read() as connection:
        return connection.execute(select(func.count()).where(*condition)).scalar_one()


def end_the_rest(client: Client) -> None:
    """End what is left in SQL, as if it had been computed."""
    now = client.database.now()
    ends = {
        "state": JobState.SUCCEEDED,
        "stop_reason": StopReason.EOS,
        "text": "AAAAAAAA",
        "finished_at": now,
    }
    ends |= {"prompt_tokens": 30, "completion_tokens": 8, "cached_tokens": 0, "reasoning_tokens": 0}
    with client.database.write() as connection:
        connection.execute(
            update(JobRow).where(JobRow.batch == "reviews", JobRow.state != JobState.SUCCEEDED).values(ends)
        )


def say(what: str, **values: Any) -> None:
    """Print a line."""
    print(json.dumps({"what": what, **values}), flush=True)


if __name__ == "__main__":
    main()
