"""Compare what `nightmill plan` says with what happens: plan a file, run it through a worker, print both.

    python -m benchmarks.plan [--rows 1000] [--times 3] [--max-sequences 32] [--postgres]

The demo model on the reference runner. Rows are haiku prompts in OpenAI's format; every fourth one goes on to
its limit of tokens (ignore_eos), so that the answers differ much in length. Starts its own Redis, and SQLite
or PostgreSQL. Prints one JSON line a time; `ratio` is the estimate over the measured time. It says something
where other programs leave the machine alone: `others` are the cores that they kept busy in either part.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil

from benchmarks.end_to_end import prompts
from nightmill.jobs.client import Client
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.process import running_worker
from nightmill.worker.link.loading import demo_model
from tests.servers import start_postgres, start_redis


def main() -> None:
    """Plan and run, as often as is asked for."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rows", type=int, default=1000)
    arguments.add_argument("--times", type=int, default=3)
    arguments.add_argument("--max-sequences", type=int, default=32)
    arguments.add_argument("--postgres", action="store_true", help="PostgreSQL in place of SQLite")
    options = arguments.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="nightmill-bench-")))
        redis = stack.enter_context(start_redis(home / "redis", durable=True))
        url = (
            stack.enter_context(start_postgres(durable=True)).create_database() if options.postgres else None
        )
        settings = Settings(data_dir=home, database_url=url, broker_url=redis.url, model=demo_model())
        client = stack.enter_context(Client(settings))
        client.database.migrate()
        for turn in range(options.times):
            file = write_file(home / "rows.jsonl", options.rows, turn)
            worker_options = ["--reference", "--max-sequences", str(options.max_sequences)]
            with Others() as while_planning:
                report = planned(file, worker_options)
            with Others() as while_running:
                report |= run(client, file, home, worker_options, str(turn))
            report["others"] = [while_planning.cores, while_running.cores]
            report["ratio"] = round(report["estimated_seconds"] / report["seconds"], 3)
            print(json.dumps({"rows": options.rows, "max_sequences": options.max_sequences} | report))


def write_file(path: Path, rows: int, seed: int) -> Path:
    """A batch file in OpenAI's format."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number, messages in enumerate(prompts(rows)):
            body: dict[str, Any] = {"messages": messages, "temperature": 0.8, "seed": draw.getrandbits(32)}
            body |= {"max_tokens": draw.randrange(16, 128), "ignore_eos": draw.random() < 0.25}
            row = {"custom_id": f"{seed}-{number}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(row | {"body": body}) + "\n")
    return path


def planned(file: Path, worker_options: list[str]) -> dict[str, Any]:
    """What the command says, in a process of its own as a user runs it."""
    command = [sys.executable, "-m", "nightmill", "plan", str(file), "--model", str(demo_model()), "--json"]
    began = time.perf_counter()
    done = subprocess.run([*command, *worker_options], capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    return {
        "plan_seconds": round(time.perf_counter() - began, 1),
        "estimated_seconds": plan["estimate"]["seconds"],
        "estimated_tail_seconds": plan["estimate"]["tail_seconds"],
        "estimated_tokens": plan["output_tokens"],
    }


def run(client: Client, file: Path, home: Path, worker_options: list[str], batch: str) -> dict[str, Any]:
    """The same rows through Redis, a worker that is ready, and the database."""
    with running_worker(client, home / "worker.log", worker_options):
        began = time.perf_counter()
        rows = client.submit_batch(file, name=batch).wait().rows
        seconds = time.perf_counter() - began
    counted = client.stats(batch)
    assert counted["state"] == {"succeeded": rows}, counted
    return {
        "seconds": round(seconds, 1),
        "tokens": counted["completion_tokens"],
    }


class Others:
    """How many cores were busy with other programs than this one and its children."""

    cores = 0.0

    def __enter__(self) -> Self:
        self._before = self._seconds()
        return self

    def __exit__(self, *exc: object) -> None:
        wall, busy, own = (now - then for now, then in zip(self._seconds(), self._before, strict=True))
        self.cores = round(max(0.0, busy - own) / wall, 2)

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """Wall clock, all cores' busy time, our own and that of children that have ended."""
        cpu = psutil.cpu_times()
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        own = sum(usage.ru_utime + usage.ru_stime for usage in used)
        return time.perf_counter(), sum(cpu) - cpu.idle - cpu.iowait, own


if __name__ == "__main__":
    main()
