"""The nightly workload through the whole path, against the engine alone on the same prompts.

    python -m benchmarks.nightly MODEL.gguf [--jobs 4096] [--max-sequences N] [--gpus 2] [--sqlite]

Texts of 50 to 400 words (about 64 to 512 tokens of Qwen's) go through enqueue_many, Redis, a Celery worker
and PostgreSQL (both started here, durable), 64 to 256 tokens are drawn for each. Then the engine computes the
same token ids in a process that does nothing else. With --gpus, one worker and then N workers share the
queue, each on a GPU of its own, and the engine is left out. Prints one JSON line; the ratios are of one run:
of each night, the first being a worker's first, and of the medians. For each, what the engine's steps cost
(`StepTimes`).
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import timed_worker
from benchmarks.common.servers import durable_client
from benchmarks.common.timed_worker import StepTimes, difference
from benchmarks.end_to_end import PeakMemory
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import load_model
from nightmill.worker.assembly.sizes import max_sequences
from nightmill.worker.commands.process import running_worker
from nightmill.worker.engine.request import Request
from nightmill.worker.link.garbage import QuietCollector
from tools.demo_model.corpus import topics, words


def main() -> None:
    """Run the service, then the engine."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--jobs", type=int, default=4096)
    arguments.add_argument("--max-sequences", type=int)
    arguments.add_argument("--tokens", type=int, nargs=2, default=(64, 256), help="bounds of max_tokens")
    arguments.add_argument("--words", type=int, nargs=2, default=(50, 400), help="bounds of a prompt")
    arguments.add_argument("--gpus", type=int, default=1)
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    options = arguments.parse_args()
    with durable_client(sqlite=options.sqlite, model=options.model, max_sequences=options.max_sequences) as (
        client,
        home,
    ):
        # Prompts of every night are new: those of the last are still in the KV cache, and would be shared.
        nights = [
            list(prompts(options.jobs, options.words, options.tokens, turn)) for turn in range(options.repeat)
        ]
        if options.gpus > 1:
            scaling(client, home, nights, options)
        else:
            against_engine(client, home, nights, options)


def against_engine(
    client: Client, home: Path, nights: Sequence[list[dict[str, Any]]], options: argparse.Namespace
) -> None:
    """One worker, then its engine alone."""
    os.environ[timed_worker.TIMES] = str(home / "steps.jsonl")  # the worker inherits it
    with running_worker(client, home / "worker.log", command=timed_worker.COMMAND) as process:
        peak = PeakMemory(process.pid)
        reports = []
        for turn, items in enumerate(nights):
            began = time.time()
            report = through_the_service(client, [process.pid], f"night-{turn}", items)
            reports.append(report | timed_worker.between(home / "steps.jsonl", began, time.time()))
        rss = peak.stop()
    print((home / "worker.log").read_text(), file=sys.stderr)
    alone, steps_alone = engine_alone(client.settings, nights)
    rate = statistics.median(report["output_tokens_per_s"] for report in reports)
    report = {
        "workload": "nightly through the service",
        "jobs": len(nights[0]),
        "max_sequences": max_sequences(client.settings),
        "database": "sqlite" if options.sqlite else "postgresql",
        "service": reports,
        "engine_alone": alone,
        "engine_alone_steps": steps_alone,
        "service_tokens_per_s": rate,
        "ratios": [
            round(report["output_tokens_per_s"] / other, 3)
            for report, other in zip(reports, alone, strict=True)
        ],
        "ratio": round(rate / statistics.median(alone), 3),
        "worker_peak_rss_mib": round(rss / 2**20),
    }
    print(json.dumps(report))


def scaling(
    client: Client, home: Path, nights: Sequence[list[dict[str, Any]]], options: argparse.Namespace
) -> None:
    """One worker, then as many as there are GPUs, on one queue."""
    rates = {}
    for workers in (1, options.gpus):
        with ExitStack() as stack:
            pids = [
                stack.enter_context(
                    running_worker(client, home / f"{workers}-{gpu}.log", ["--gpu", str(gpu)])
                ).pid
                for gpu in range(workers)
            ]
            runs = [
                through_the_service(client, pids, f"{workers}-{turn}", items)
                for turn, items in enumerate(nights)
            ]
        print(json.dumps({"workers": workers, "runs": runs}), file=sys.stderr)
        rates[workers] = statistics.median(run["output_tokens_per_s"] for run in runs)
    report = {"workload": "nightly, several GPUs", "jobs": len(nights[0]), "tokens_per_s": rates}
    print(json.dumps(report | {"ratio": round(rates[options.gpus] / rates[1], 3)}))


def prompts(
    count: int, length: tuple[int, int], answer: tuple[int, int], seed: int
) -> Iterator[dict[str, Any]]:
    """Items for enqueue_many; `length`: bounds of a prompt's words, `answer`: bounds of its max_tokens."""
    draw = random.Random(seed)
    vocabulary = [*topics(), *words()]
    for number in range(count):
        text = " ".join(draw.choices(vocabulary, k=draw.randint(*length)))
        yield {"prompt": f"{seed}-{number}: {text}.", "max_tokens": draw.randint(*answer), "seed": number}


def through_the_service(
    client: Client, pids: Sequence[int], batch: str, items: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """From the call of enqueue_many until the last row was written, by the rows' own times."""
    busy = {process.pid: sum(process.cpu_times()[:2]) for process in families(pids)}
    first = client.database.now()
    began = time.perf_counter()
    client.enqueue_many(items, batch=batch, temperature=0.7, ignore_eos=True)
    enqueued = time.perf_counter() - began
    client.wait(batch=batch)
    finished = [job.finished_at for job in client.results(batch=batch, wait=False) if job.finished_at]
    seconds = (max(finished) - first).total_seconds()
    counted = client.stats(batch)
    assert counted["state"] == {"succeeded": len(items)}, counted
    assert counted["completion_tokens"] == sum(item["max_tokens"] for item in items)
    cpu = [sum(process.cpu_times()[:2]) - busy[process.pid] for process in families(pids)]
    return {
        "output_tokens_per_s": round(counted["completion_tokens"] / seconds),
        "prompt_tokens": counted["prompt_tokens"],
        "seconds": round(seconds, 2),
        "enqueue_seconds": round(enqueued, 2),
        "cpu_seconds_worker_engine": [round(used, 2) for used in cpu],
    }


def families(pids: Sequence[int]) -> list[psutil.Process]:
    """The workers' processes, each followed by its engine's."""
    return [process for pid in pids for process in (psutil.Process(pid), *psutil.Process(pid).children())]


def engine_alone(
    settings: Settings, nights: Sequence[list[dict[str, Any]]]
) -> tuple[list[int], list[dict[str, float]]]:
    """Output tokens per second of the engine that a worker builds, with nothing else in its process.

    And what its steps cost, for each night.
    """
    model = load_model(settings)
    engine = build_engine(settings, model)
    times = StepTimes(engine)
    rates, steps = [], []
    for turn, items in enumerate(nights):
        requests = [
            Request(
                f"{turn}-{number}", 1, tuple(model.tokenizer.encode(item["prompt"])),
                GenerationParams(max_tokens=item["max_tokens"], temperature=0.7, ignore_eos=True),
                seed=item["seed"],
            )
            for number, item in enumerate(items)
        ]  # fmt: skip
        with QuietCollector():  # as in a worker
            before, began = times.counted(), time.perf_counter()
            for request in requests:
                engine.submit(request)
            tokens = 0
            while engine.has_work:
                tokens += sum(completion.completion_tokens for completion in engine.step())
            rates.append(round(tokens / (time.perf_counter() - began)))
            steps.append(difference(before, times.counted()))
    engine.close()
    return rates, steps


if __name__ == "__main__":
    main()
