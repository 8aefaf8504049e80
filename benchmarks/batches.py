"""A night of 100,000 mixed rows, 1% of them bad in 12 ways; and a batch of 10,000 that is cancelled.

    python -m benchmarks.batches [--rows 100000] [--sqlite] [night | cancel ...]

night: submits with `nightmill batch submit` in a process of its own (time, peak memory), works with the
instant worker, and writes results and errors. Then it checks what must hold: the batch is
completed_with_errors, exactly the bad rows failed, and results and errors have each row exactly once.

cancel: the time from the command until no row of 10,000 is running, with 64 on the reference runner.

Starts its own Redis and PostgreSQL, with durable settings. Prints one JSON line a workload.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import instant_worker
from benchmarks.servers import durable_client
from nightmill.jobs.client import Client
from nightmill.jobs.contract import JobState
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.process import running_worker
from nightmill.worker.link.loading import demo_model
from tests.servers import worker_env

EVERY = 100  # one bad row in so many

_HEAD = '{"custom_id": "{id}", "method": "POST", "url": "/v1/chat/completions"'
# Twelve kinds of bad rows. {id} and {body} are those of a good row, {rest} is its body after the brace.
BAD = [
    "{not json",
    "[1, 2]",
    '{"method": "POST", "url": "/v1/chat/completions", "body": {body}}',
    _HEAD + "}",
    _HEAD.replace("POST", "GET") + ', "body": {body}}',
    _HEAD.replace("chat/completions", "embeddings") + ', "body": {body}}',
    _HEAD + ', "body": {"model": "m"}}',
    _HEAD + ', "body": {"n": 2, {rest}}',
    _HEAD + ', "body": {"tools": [{}], {rest}}',
    _HEAD + ', "body": {"top_p": 7, {rest}}',
    _HEAD + ', "body": {"max_tokens": "x", {rest}}',
    _HEAD.replace("{id}", "row-0") + ', "body": {body}}',
]


def main() -> None:
    """Write the file, submit it, work, check."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("workloads", nargs="*", default=["night", "cancel"])
    arguments.add_argument("--rows", type=int, default=100_000)
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    options = arguments.parse_args()
    with durable_client(sqlite=options.sqlite, model=demo_model()) as (client, home):
        for name in options.workloads:
            print(json.dumps({"workload": name} | WORKLOADS[name](client, home, options.rows)))


def night(client: Client, home: Path, rows: int) -> dict[str, Any]:
    """Submit, work, write, check; returns times in seconds and memory in MiB."""
    path = home / "prompts.jsonl"
    bad = write_rows(path, rows)
    report: dict[str, Any] = {
        "rows": rows,
        "bad": len(bad),
        "file_mib": round(path.stat().st_size / 2**20, 1),
    }
    submit = ["batch", "submit", str(path), "--name", "night"]
    submit += ["--model", "nightmill-demo", "--max-tokens", "8", "--ignore-eos"]
    seconds, peak = nightmill(client.settings, *submit)
    report |= {"submit_seconds": seconds, "submit_peak_mib": peak}
    batch = client.get_batch("night")
    with running_worker(client, home / "worker.log", command=instant_worker.COMMAND):
        began, done = time.perf_counter(), batch.status(errors=False).done
        status = batch.wait()
        report["rows_per_second"] = round((status.done - done) / (time.perf_counter() - began))
    outputs = [home / "results.jsonl", home / "errors.jsonl"]
    for kind, output in zip(("results", "errors"), outputs, strict=True):
        seconds, peak = nightmill(client.settings, "batch", kind, "night", "-o", str(output))
        report |= {f"{kind}_seconds": seconds, f"{kind}_peak_mib": peak}
    began = time.perf_counter()
    batch.status()
    report["status_seconds"] = round(time.perf_counter() - began, 3)
    results, errors = ([json.loads(line) for line in output.open()] for output in outputs)
    ids = [row["custom_id"] for row in (*results, *errors) if row["custom_id"] is not None]
    assert status.state == "completed_with_errors", status
    assert {row["error"]["line"] for row in errors} == bad
    assert len(results) + len(errors) == rows and len(set(ids)) == len(ids)
    assert [row["custom_id"] for row in results] == [f"row-{n}" for n in range(rows) if n + 1 not in bad]
    codes = sorted({row["error"]["code"] for row in errors})
    return report | {"state": str(status.state), "codes": codes}


def cancel(client: Client, home: Path, rows: int) -> dict[str, Any]:
    """10,000 rows, 64 of them running, cancelled."""
    items = ({"prompt": "Write a haiku", "seed": seed} for seed in range(10_000))
    batch = client.submit_batch(items, name="cancel", model="demo", max_tokens=450, ignore_eos=True)
    arguments = ["--reference", "--max-sequences", "64", "--name", "demo"]
    with running_worker(client, home / "cancel.log", arguments):
        while batch.status(errors=False).states.get(JobState.RUNNING, 0) < 64:
            time.sleep(0.05)
        time.sleep(2.0)  # some tokens
        with ThreadPoolExecutor(1) as pool:
            began = time.perf_counter()
            cancelling = pool.submit(batch.cancel)
            last_seen_running = began
            while not cancelling.done() or last_seen_running > time.perf_counter() - 0.2:
                if batch.status(errors=False).states.get(JobState.RUNNING):
                    last_seen_running = time.perf_counter()
                time.sleep(0.01)
            at_once, asked = cancelling.result()
    status = batch.status()
    partial = sum(bool(job.text) for job in batch.errors())
    assert status.state == "cancelled" and status.rows == status.done == 10_000, status
    assert at_once + asked + status.succeeded >= 10_000
    return {
        "rows": 10_000,
        "running": asked,
        "none_running_seconds": round(last_seen_running - began, 3),
        "partial_texts": partial,
        "states": {str(state): number for state, number in status.states.items()},
    }


def write_rows(path: Path, rows: int) -> set[int]:
    """Write the file; returns the numbers of the bad lines, from 1."""
    draw = random.Random(rows)
    bad = set()
    with path.open("w") as file:
        for number in range(rows):
            body: dict[str, Any] = {"model": "m", "seed": number}
            text = f"Write a haiku about rain, number {number}. " + "It may be long. " * draw.randrange(8)
            if number % 3:
                url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
            else:
                url, body["prompt"] = "/v1/completions", text
            row = {"custom_id": f"row-{number}", "method": "POST", "url": url, "body": body}
            line = json.dumps(row)
            if number % EVERY == EVERY // 2:
                bad.add(number + 1)
                chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
                template = BAD[number // EVERY % len(BAD)]
                line = template.replace("{body}", chat).replace("{rest}", chat[1:])
                line = line.replace("{id}", f"row-{number}")
            file.write(line + "\n")
    return bad


def nightmill(settings: Settings, *arguments: str) -> tuple[float, float]:
    """Run a command; returns (seconds, peak resident MiB)."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "nightmill", *arguments], env=worker_env(settings), stdout=subprocess.DEVNULL
    )
    _, code, usage = os.wait4(process.pid, 0)
    assert code == 0, (arguments, code)
    return round(time.perf_counter() - began, 2), round(usage.ru_maxrss / 1024, 1)


WORKLOADS = {"night": night, "cancel": cancel}

if __name__ == "__main__":
    main()
