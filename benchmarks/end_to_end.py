"""The path around the model, workload by workload, with Redis and PostgreSQL (fsync on) of its own.

    python -m benchmarks.end_to_end [--jobs 10000] [--sqlite] [--model MODEL.gguf] [WORKLOAD ...]

enqueue    jobs a second from `enqueue_many` into SQL and Redis, and how much the client's memory grows
service    jobs a second through claim, tokenising, scheduling and writing; a runner that draws at once
reference  the NumPy runner with the demo model, 32 sequences at once: tokens a second
cancel     from `cancel` of a running job to its final row
steps      what a step costs the host: 1,024 sequences decode and 4,096 wait; nothing is computed
start      from the start of a worker's process to its row that says ready, with an empty cache of kernels and
           again; with --model on a GPU, else the demo model with NumPy
swap       three swaps between two models, which are one file under two names: from a call for the model that
           is not loaded to the end of the old engine, the choice, the load, and the answer; as start

Prints a JSON line for each workload. Needs no GPU. Takes four minutes on two busy cores.
"""

import argparse
import json
import os
import random
import resource
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from sqlalchemy import select

from benchmarks.common.servers import durable_client
from nightmill.jobs.base.contract import JobState
from nightmill.jobs.client.client import Client
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.jobs import Selection
from nightmill.jobs.sql.tables import LoadRow
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from tests.support import instant_worker
from tests.support.engines import NoText
from tests.support.instant_worker import InstantRunner
from tools.demo_model.corpus import topics, words

RUNNING, WAITING, PROMPT, ANSWER = (
    1024,
    4096,
    256,
    512,
)  # sequences, and tokens of each, of the workload steps


def main() -> None:
    """Run the workloads that are asked for."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("workloads", nargs="*", default=[*WORKLOADS], metavar="WORKLOAD")
    arguments.add_argument("--jobs", type=int, default=10_000)
    arguments.add_argument("--model", type=Path, default=demo_model(), help="of start and swap")
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    options = arguments.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        arguments.error(f"no such workload: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    chosen = {name: WORKLOADS[name] for name in options.workloads}
    model = options.model if chosen.keys() <= {"start", "swap"} else demo_model()
    with durable_client(sqlite=options.sqlite, model=model) as (client, home):
        for name, workload in chosen.items():
            report = workload(client, home, options.jobs)
            print(
                json.dumps(
                    {"workload": name, "database": "sqlite" if options.sqlite else "postgresql"} | report
                )
            )


def enqueue(client: Client, home: Path, jobs: int) -> dict[str, Any]:
    """Chat prompts from a generator into PostgreSQL and Redis. Memory: delta from a tenth to the whole."""
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


def steps(client: Client, home: Path, jobs: int) -> dict[str, Any]:
    """Milliseconds to plan, build and apply a step in which all decode, of 200 steps."""
    vocab = 32_000
    runner = InstantRunner(vocab, RUNNING)
    runner.depth, runner.kv_pages = 3, RUNNING * (PROMPT + ANSWER) // runner.page_size + RUNNING
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=PROMPT + ANSWER + 1, max_sequences=RUNNING, token_budget=16_384),
    )
    rng = np.random.default_rng(0)
    params = GenerationParams(max_tokens=ANSWER, temperature=0.7, ignore_eos=True)
    for number in range(RUNNING + WAITING):
        prompt = tuple(rng.integers(0, vocab, PROMPT).tolist())
        engine.submit(Request(str(number), 1, prompt, params, number))
    while engine.stats.generated_tokens < 8 * RUNNING:  # until every prompt is computed
        engine.step()
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*given: Any) -> Any:
            began = time.perf_counter()
            result = call(*given)
            seconds[name].append(time.perf_counter() - began)
            return result

        return timing

    engine._scheduler.plan = timed("plan", engine._scheduler.plan)  # type: ignore[method-assign]
    engine._builder.build = timed("build", engine._builder.build)  # type: ignore[method-assign]
    engine._applier.apply = timed("apply", engine._applier.apply)  # type: ignore[method-assign]
    step = timed("step", engine.step)
    for _ in range(200):
        assert step() == []
    return {
        "running": engine.running,
        "waiting": engine.waiting,
        **{f"{name}_ms": round(1000 * statistics.median(each), 3) for name, each in seconds.items()},
        "step_worst_ms": round(1000 * max(seconds["step"]), 3),
    }


def start(client: Client, home: Path, jobs: int) -> dict[str, Any]:
    """Seconds to the worker's row that says ready, twice; the file of the model is in the page cache."""
    assert client.settings.model is not None
    Path(client.settings.model).read_bytes()
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")  # the worker inherits it
    seconds = []
    for _ in range(2):
        began, log = time.perf_counter(), home / "start.log"
        with running_worker(client, log, ["--max-sequences", "256"]):
            seconds.append(round(time.perf_counter() - began, 1))
        print(log.read_text(), file=sys.stderr)  # where the time goes
    return {
        "model": Path(client.settings.model).name,
        "cold_cache_seconds": seconds[0],
        "warm_cache_seconds": seconds[1],
    }


def swap(client: Client, home: Path, jobs: int) -> dict[str, Any]:
    """Seconds of each part of three swaps; kernels are compiled, and the file is in the page cache."""
    model = client.settings.model
    assert model is not None
    Path(model).read_bytes()
    log, names = home / "swap.log", ("one", "other")
    listed = ["--models", ",".join(f"{name}={model}" for name in names), "--swap-for-interactive"]
    turns = Client(client.settings.model_copy(update={"model": None}))
    found = []
    with running_worker(turns, log, [*listed, "--max-sequences", "256"]):
        for number in range(4):
            asked = {"model": names[number % 2], "max_tokens": 1, "ignore_eos": True, "interactive": True}
            job_id = client.enqueue("Hello", **asked)
            client.wait(job_id)
            with client.database.read() as connection:
                loads = connection.execute(select(LoadRow).order_by(LoadRow.id.desc()).limit(2)).all()
            job = client.get(job_id)
            if number:  # the first model is loaded before
                new, old = loads
                marks = [job.created_at, old.ended_at, new.began_at, new.ready_at, job.finished_at]
                found.append([(then - now).total_seconds() for now, then in pairwise(marks)])
        turns.close()
    print(log.read_text(), file=sys.stderr)  # where the time goes
    parts = ("old_engine_ends", "choice", "load", "answer")
    return {"model": Path(model).name, "seconds": [round(sum(each), 1) for each in found]} | {
        part: [round(each[place], 2) for each in found] for place, part in enumerate(parts)
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


WORKLOADS = {
    "enqueue": enqueue, "service": service, "reference": reference, "cancel": cancel, "steps": steps,
    "start": start, "swap": swap,
}  # fmt: skip

if __name__ == "__main__":
    main()
