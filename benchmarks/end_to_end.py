"""Measure the path around the model: enqueue_many, claim to write, and the reference runner at work.

    python -m benchmarks.end_to_end [--jobs 10000] [--sqlite] [enqueue | service | reference | cancel ...]

Starts its own Redis and PostgreSQL, with durable settings (fsync on). Prints one JSON line a workload.
"""

import argparse
import json
import os
import random
import resource
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import instant_worker
from benchmarks.servers import durable_client
from nightmill.jobs.client import Client
from nightmill.jobs.contract import JobState
from nightmill.jobs.sql.jobs import Selection
from nightmill.worker.commands.process import running_worker
from nightmill.worker.link.loading import demo_model
from tools.demo_corpus import topics, words


def main() -> None:
    """Run the workloads that are asked for."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("workloads", nargs="*", default=["enqueue", "service", "reference", "cancel"])
    arguments.add_argument("--jobs", type=int, default=10_000)
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    options = arguments.parse_args()
    with durable_client(sqlite=options.sqlite, model=demo_model()) as (client, home):
        for name in options.workloads:
            report = WORKLOADS[name](client, home, options.jobs)
            print(
                json.dumps(
                    {"workload": name, "database": "sqlite" if options.sqlite else "postgresql"} | report
                )
            )


def enqueue(client: Client, home: Path, jobs: int) -> dict[str, Any]:
    """Chat prompts from a generator into PostgreSQL and Redis. Memory: growth from a tenth to the whole."""
    client.enqueue("warm up")
    client.enqueue_many(prompts(jobs // 10), batch="enqueue-tenth")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    ids = client.enqueue_many(prompts(jobs), batch="enqueue")
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counted = client.stats("enqueue")["state"]
    assert counted == {"queued": jobs} and len(ids) == jobs
    for batch in ("enqueue", "enqueue-tenth"):
        client.cancel_batch(batch)
    return {
        "jobs": jobs,
        "seconds": round(seconds, 3),
        "jobs_per_second": round(jobs / seconds),
        "memory_growth_mib": round((after - before) / 1024, 1),
    }


def service(client: Client, home: Path, jobs: int) -> dict[str, Any]:
    """Claim, tokenise, schedule, detokenise, write: an instant runner draws 8 tokens a job."""
    ids = client.enqueue_many(prompts(jobs), batch="service", max_tokens=8, ignore_eos=True)
    with running_worker(client, home / "instant.log", command=instant_worker.COMMAND) as process:
        # The worker may have begun before it said that it is ready: count from a job that is done.
        began, done = time.perf_counter(), client.stats("service")["state"].get("succeeded", 0)
        client.wait(batch="service")
        seconds = time.perf_counter() - began
        rss = psutil.Process(process.pid).memory_info().rss
        cpu = sum(psutil.Process(process.pid).cpu_times()[:2])
    states = client.stats("service")["state"]
    assert states == {"succeeded": jobs}, states
    assert all(job.attempt == 1 and job.completion_tokens == 8 for job in client.results(ids))
    return {
        "jobs": jobs,
        "jobs_per_second": round((jobs - done) / seconds),
        "worker_rss_mib": round(rss / 2**20),
        "worker_cpu_ms_per_job": round(1000 * cpu / jobs, 2),
    }


def reference(client: Client, home: Path, jobs: int) -> dict[str, Any]:
    """The demo model on the reference runner, 32 sequences at once, 64 tokens a job."""
    count = 640
    log = home / "reference.log"
    with running_worker(client, log, ["--reference", "--max-sequences", "32"]) as process:
        peak = PeakMemory(process.pid)
        began = time.perf_counter()
        client.enqueue_many(prompts(count), batch="reference", max_tokens=64, ignore_eos=True)
        client.wait(batch="reference")
        seconds = time.perf_counter() - began
        rss = peak.stop()
    counted = client.stats("reference")
    assert counted["state"] == {"succeeded": count}, counted
    return {
        "jobs": count,
        "output_tokens_per_second": round(counted["completion_tokens"] / seconds),
        "prompt_tokens_per_second": round(counted["prompt_tokens"] / seconds),
        "worker_peak_rss_mib": round(rss / 2**20),
        "cores": os.cpu_count(),
    }


def cancel(client: Client, home: Path, jobs: int) -> dict[str, Any]:
    """From `cancel` of a running job to its final row, with 32 sequences running."""
    delays: list[float] = []
    with running_worker(client, home / "cancel.log", ["--reference", "--max-sequences", "32"]):
        client.enqueue_many(prompts(64), batch="cancel", max_tokens=450, ignore_eos=True)
        while len(delays) < 20:
            running = client.store.find(Selection(batch="cancel", states=[JobState.RUNNING]), limit=1)
            if not running:
                time.sleep(0.01)
                continue
            began = time.perf_counter()
            client.cancel(running[0].id)
            while not (job := client.get(running[0].id)).state.final:
                time.sleep(0.002)
            if job.state is JobState.CANCELLED:
                delays.append(time.perf_counter() - began)
        client.cancel_batch("cancel")
        client.wait(batch="cancel")
    return {
        "cancelled": len(delays),
        "seconds_median": round(statistics.median(delays), 3),
        "seconds_max": round(max(delays), 3),
    }


def prompts(count: int) -> Iterator[list[dict[str, str]]]:
    """Chat prompts, different from one another."""
    draw = random.Random(count)
    subjects, vocabulary = topics(), words()
    for _ in range(count):
        text = f"Write a haiku about {draw.choice(subjects)} that contains the word {draw.choice(vocabulary)}"
        yield [{"role": "user", "content": text}]


class PeakMemory:
    """Watches the resident size of a process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._peak = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The largest size seen, in bytes."""
        self._stopping.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._stopping.wait(0.1):
            self._peak = max(self._peak, self._process.memory_info().rss)


WORKLOADS = {"enqueue": enqueue, "service": service, "reference": reference, "cancel": cancel}

if __name__ == "__main__":
    main()
