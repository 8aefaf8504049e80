"""How many rows a second one PostgreSQL feeds to workers that compute nothing, and what limits that.

    python -m benchmarks.load [--workers 1,4,16] [--seconds 20]

Real workers (Celery, claims, tokenising, scheduling, writing) on a runner of no cost, PostgreSQL and Redis of
their own with durable settings. For each number of workers: rows a second, how long transactions that claim
and that write take, and who uses the processor. Prints Markdown for RESULTS.md.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import psycopg

from benchmarks import instant_worker
from benchmarks.end_to_end import prompts
from nightmill.jobs.client import Client
from nightmill.jobs.settings import Settings
from nightmill.worker.link.loading import demo_model
from tests.campaign.postgres import PostgresControl
from tests.servers import start_postgres, start_redis, wait_until, worker_env

FIRST_GUESS = 2_500  # rows a second and worker, for the number of rows to queue beforehand
MOST = 12_000  # and of all workers together
TOKENS = 8
MOST_CONNECTIONS = 400
GPU_NEEDS = {"0.1B model (1,300 rows/s)": 1300, "7B, short answers (150)": 150, "7B, long answers (60)": 60}


def main() -> None:
    """Measure each number of workers, then print the tables."""
    if sys.argv[1:2] == ["worker"]:
        return timed_worker()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    found = []
    for number in map(int, options.workers.split(",")):
        print(f"{number} workers ...", file=sys.stderr)
        found.append(measure(number, options.seconds))
        print(json.dumps(found[-1]), file=sys.stderr)
    print("\n".join(tables(found)))
    return None


# -- a worker that keeps its times ---------------------------------------------------------------


def timed_worker() -> None:
    """The instant worker, with every claim and every write timed into the file that LOAD_TIMES names."""
    from nightmill.jobs.sql.claims import Claims

    times: list[tuple[str, float, float, int]] = []
    lock = threading.Lock()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(claims: Claims, items: Any) -> Any:
            began = time.perf_counter()
            result = call(claims, items)
            with lock:
                times.append((name, time.time(), time.perf_counter() - began, len(items)))
            return result

        return measured

    Claims.claim = timed("claim", Claims.claim)  # type: ignore[method-assign]
    Claims.finish = timed("write", Claims.finish)  # type: ignore[method-assign]

    def flush() -> None:
        with Path(os.environ["LOAD_TIMES"]).open("a") as file:
            while True:
                time.sleep(0.5)
                with lock:
                    taken = times[:]
                    times.clear()
                file.writelines(json.dumps(entry) + "\n" for entry in taken)
                file.flush()

    threading.Thread(target=flush, daemon=True).start()
    instant_worker.serve(sys.argv[2:])


# -- one measurement -----------------------------------------------------------------------------


def measure(workers: int, seconds: float) -> dict[str, Any]:
    """Queue rows, start the workers, and look at `seconds` of their work once all are ready."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="nightmill-load-")))
        redis = stack.enter_context(start_redis(home / "redis", durable=True))
        server = PostgresControl(stack.enter_context(start_postgres(durable=True)))
        stack.callback(server.stop)
        server.set("max_connections", MOST_CONNECTIONS)  # the default of 100 is too few for 16 workers
        settings = Settings(
            data_dir=home, database_url=server.create_database(), broker_url=redis.url, model=demo_model()
        )
        client = stack.enter_context(Client(settings))
        client.database.migrate()
        plain = settings.resolved_database_url.set(drivername="postgresql")
        watcher = stack.enter_context(
            psycopg.connect(plain.render_as_string(hide_password=False), autocommit=True)
        )
        rows = round(min(FIRST_GUESS * workers, MOST) * (seconds + 5.0))
        client.enqueue_many(prompts(rows), max_tokens=TOKENS, ignore_eos=True, priority=5)
        watcher.execute("VACUUM ANALYZE jobs")
        running = [stack.enter_context(started(settings, home, number)) for number in range(workers)]
        wait_until(lambda: _ready(watcher) >= workers, 120.0, "the start of the workers")
        postmaster = psutil.Process(_postmaster(watcher))
        groups = {
            "PostgreSQL": [postmaster],
            "Redis": [psutil.Process(redis._process.pid)] if redis._process else [],
            "workers": [psutil.Process(process.pid) for process in running],
        }
        first, cpu, began = _done(watcher), _cpu(groups), time.perf_counter()
        moment, waits, done = time.time(), Counter[str](), first
        while done < rows and time.perf_counter() - began < seconds:
            for _ in range(5):
                time.sleep(0.2)
                waits.update(_waits(watcher))
            done = _done(watcher)
        passed = time.perf_counter() - began
        used = {name: (after - cpu[name]) / passed for name, after in _cpu(groups).items()}
        time.sleep(0.7)  # the workers' last times
        return {
            "workers": workers,
            "rows_per_second": round((done - first) / passed),
            **_times(home, moment, moment + passed),
            "cores": {name: round(value, 2) for name, value in used.items()},
            "cores_of_host": os.cpu_count(),
            "connections": _number(
                watcher, "SELECT count(*) FROM pg_stat_activity WHERE usename IS NOT NULL"
            ),
            "waits": dict(waits.most_common(4)),
            "seconds": round(passed, 1),
        }


@contextmanager
def started(settings: Settings, home: Path, number: int) -> Iterator["subprocess.Popen[bytes]"]:
    """One worker; killed at the end, since what is left in its queue is worth nothing."""
    times = {"LOAD_TIMES": str(home / f"times-{number}.jsonl"), "OPENBLAS_NUM_THREADS": "1"}
    with (home / f"worker-{number}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load", "worker"],
            env=worker_env(settings) | times,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _times(home: Path, begin: float, end: float) -> dict[str, float]:
    """Percentiles, in ms, of what was timed between two moments."""
    seconds: dict[str, list[float]] = {"claim": [], "write": []}
    rows: Counter[str] = Counter()
    for path in home.glob("times-*.jsonl"):
        for line in path.read_text().splitlines():
            name, at, duration, count = json.loads(line)
            if begin <= at <= end:
                seconds[name].append(duration)
                rows[name] += count
    found: dict[str, float] = {}
    for name, durations in seconds.items():
        durations.sort()
        for percent in (50, 99):
            place = min(len(durations) - 1, len(durations) * percent // 100)
            found[f"{name}_p{percent}_ms"] = round(1000 * durations[place], 1) if durations else 0.0
        found[f"rows_a_{name}"] = round(rows[name] / max(1, len(durations)), 1)
    return found


def _cpu(groups: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Processor seconds so far, with all children; the engines' apart from their workers'."""
    used: dict[str, float] = {}
    for name, processes in groups.items():
        for process in processes:
            used[name] = used.get(name, 0.0) + sum(process.cpu_times()[:2])
            below = "engines" if name == "workers" else name
            for child in process.children(recursive=True):
                used[below] = used.get(below, 0.0) + sum(child.cpu_times()[:2])
    return used


def _done(connection: "psycopg.Connection[Any]") -> int:
    return _number(connection, "SELECT count(*) FROM jobs WHERE state = 'succeeded'")


def _ready(connection: "psycopg.Connection[Any]") -> int:
    return _number(connection, "SELECT count(*) FROM workers WHERE state = 'ready'")


def _postmaster(connection: "psycopg.Connection[Any]") -> int:
    return psutil.Process(_number(connection, "SELECT pg_backend_pid()")).ppid()


def _number(connection: "psycopg.Connection[Any]", query: str) -> int:
    row = connection.execute(query).fetchone()  # type: ignore[call-overload]
    assert row is not None
    return int(row[0])


def _waits(connection: "psycopg.Connection[Any]") -> list[str]:
    """What the sessions in the middle of a statement do now: a wait event, or CPU."""
    query = (
        "SELECT coalesce(wait_event_type || ':' || wait_event, 'CPU') FROM pg_stat_activity "
        "WHERE state = 'active' AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    return [row[0] for row in connection.execute(query)]


# -- what is printed -----------------------------------------------------------------------------


def tables(found: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown for RESULTS.md."""
    yield f"On {os.cpu_count()} cores; rows of {TOKENS} tokens; PostgreSQL and Redis on the same host.\n"
    yield (
        "| workers | rows/s | claim p50, p99 (rows) | write p50, p99 (rows) "
        "| connections | cores: PostgreSQL, workers, engines, Redis | limited by |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for one in found:
        cores = one["cores"]
        shares = ", ".join(
            f"{cores.get(name, 0.0):.1f}" for name in ("PostgreSQL", "workers", "engines", "Redis")
        )
        yield (
            f"| {one['workers']} | {one['rows_per_second']:,} "
            f"| {one['claim_p50_ms']}, {one['claim_p99_ms']} ms ({one['rows_a_claim']}) "
            f"| {one['write_p50_ms']}, {one['write_p99_ms']} ms ({one['rows_a_write']}) "
            f"| {one['connections']} | {shares} | {limit(one)} |"
        )
    best = max(one["rows_per_second"] for one in found)
    yield "\n| each GPU runs | GPUs that one such database feeds |"
    yield "| --- | --- |"
    for what, need in GPU_NEEDS.items():
        yield f"| {what} | {best / need:.0f} |" if best >= need else f"| {what} | {best / need:.1f} |"


def limit(one: dict[str, Any]) -> str:
    """In words, what was used up; or what PostgreSQL's sessions waited for most."""
    cores = one["cores"]
    if sum(cores.values()) > 0.9 * one["cores_of_host"]:
        return "all cores of the host"
    if cores.get("workers", 0.0) > 0.85 * one["workers"]:
        return "one core of each worker (Python runs one thread at a time)"
    waits = [name for name in one["waits"] if name != "CPU" and not name.startswith("Client:")]
    return f"PostgreSQL, waiting for {waits[0]}" if waits else "nothing that was measured"


if __name__ == "__main__":
    main()
