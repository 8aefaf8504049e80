"""Show that nobody fails by another's fault: thousands of jobs, a few of which kill the engine's process.

    python -m benchmarks.poison [--jobs 4096] [--guilty 3] [--kills 0] [--sqlite]

All jobs are in flight at once; a loop starts the worker again whenever it has ended, as a supervisor does.
`--kills` kills the worker from outside (kill -9), so many times, at random moments. Exactly the guilty must
fail, within their share of restarts. Prints one JSON line.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.poisoned_worker import COMMAND, POISON, TOKENS
from benchmarks.servers import durable_client
from nightmill.jobs.client import Client
from nightmill.jobs.contract import JobState
from nightmill.jobs.sql.jobs import Selection
from nightmill.worker.commands.process import WorkerProcess
from nightmill.worker.link.loading import demo_model

BATCH = "poison"


def main() -> None:
    """Run it, and check what must hold."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--jobs", type=int, default=4096)
    arguments.add_argument("--guilty", type=int, default=3)
    arguments.add_argument("--kills", type=int, default=0)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    options = arguments.parse_args()
    quick = {"heartbeat_seconds": 0.5, "stale_seconds": 3.0, "resend_seconds": 5.0}
    with durable_client(sqlite=options.sqlite, model=demo_model(), reference=True, **quick) as (client, home):
        report = run(client, home, options.jobs, options.guilty, options.kills, random.Random(options.seed))
    print(json.dumps(report))


def run(
    client: Client, home: Path, jobs: int, guilty: int, kills: int, draw: random.Random
) -> dict[str, Any]:
    """Enqueue, supervise, count; AssertionError where an innocent job failed, or a guilty one did not."""
    chosen = set(draw.sample(range(jobs), guilty))
    client.enqueue_many(
        (
            {"prompt": "Count from 1 to 3", "seed": POISON if number in chosen else 1}
            for number in range(jobs)
        ),
        batch=BATCH,
        max_tokens=TOKENS,
        ignore_eos=True,
    )
    began = time.perf_counter()
    restarts, killed = supervise(client, home, jobs, kills, draw)
    results = list(client.results(batch=BATCH, wait=False))
    failed = [job for job in results if job.state is JobState.FAILED]
    good = [job for job in results if job.state is JobState.SUCCEEDED]
    assert len(failed) == guilty and {job.seed for job in failed} <= {POISON}
    assert len(good) == jobs - guilty and {job.completion_tokens for job in good} == {TOKENS}
    assert len({job.text for job in good}) == 1 and good[0].text
    assert all(job.failures == 0 for job in good) or killed
    bound = guilty * ((jobs - 1).bit_length() + 1) + 3 + killed
    assert restarts <= bound, (restarts, bound)
    return {
        "jobs": jobs,
        "guilty": guilty,
        "killed_from_outside": killed,
        "restarts": restarts,
        "restarts_at_most": bound,
        "failed": len(failed),
        "succeeded": len(good),
        "attempts_of_a_job": dict(sorted(Counter(job.attempt for job in results).items())),
        "seconds": round(time.perf_counter() - began),
    }


def supervise(client: Client, home: Path, jobs: int, kills: int, draw: random.Random) -> tuple[int, int]:
    """Start the worker until every job has ended: (restarts, kills)."""
    restarts, killed = -1, 0
    mine = Selection(batch=BATCH)
    while left := client.store.count_unfinished(mine):
        restarts += 1
        print(f"start {restarts + 1}: {left} jobs left", file=sys.stderr)
        worker = WorkerProcess(client, home / "worker.log", ["--max-sequences", str(jobs)], COMMAND)
        kill_at = time.monotonic() + draw.uniform(2.0, 12.0) if killed < kills else float("inf")
        while worker.exit_code is None and client.store.count_unfinished(mine):
            if time.monotonic() > kill_at:
                worker.popen.kill()
                killed += 1
                break
            time.sleep(0.1)
        worker.close()
    return restarts, killed


if __name__ == "__main__":
    main()
