"""Memory that is taken and not used: KV pages, and the host's with thousands of jobs in flight.

    python -m benchmarks.memory [--jobs 8192] [--max-sequences 4096] [pages | host ...]

pages  the nightly workload's lengths through the engine, with a runner that computes nothing: the share of
       places in allocated pages that hold no token, averaged over the steps. Nothing is shared
host   texts through Redis, the worker and PostgreSQL, 400 to 500 tokens each, with such a runner: peak
       resident sizes of the worker's process and of its engine's

Prints one JSON line each. No GPU: what CUDA itself keeps on the host comes on top.
"""

import argparse
import json
import time
from typing import Any

import psutil

from benchmarks import instant_worker
from benchmarks.end_to_end import PeakMemory
from benchmarks.engine import WORKLOADS
from benchmarks.nightly import prompts
from benchmarks.scheduling import VOCAB, NoRunner
from benchmarks.servers import durable_client
from nightmill.worker.commands.process import running_worker
from nightmill.worker.engine.engine import Engine
from nightmill.worker.link.loading import demo_model
from nightmill.worker.runners.base import StepBatch
from tests.engines import NoText

WORDS, TOKENS = (50, 200), (400, 500)  # so long that thousands are running before the first ends


class CountingRunner(NoRunner):
    """Adds up the tokens of the sequences in each step."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.tokens = self.steps = 0

    def launch(self, batch: StepBatch) -> None:
        """Count, and compute nothing."""
        self.steps += 1
        self.tokens += int(batch.context_lengths.sum())
        super().launch(batch)


def pages(options: argparse.Namespace) -> dict[str, Any]:
    """The share of places without a token."""
    workload = WORKLOADS["nightly"]
    runner = CountingRunner(workload.slots)
    engine = Engine(
        runner, text_stream=NoText, eos_ids=frozenset(), token_budget=workload.token_budget,
        context_length=workload.context + 1, max_sequences=workload.slots, prefix_sharing=False,
    )  # fmt: skip
    for request in workload.requests(VOCAB, 0):
        engine.submit(request)
    pool, places = engine._scheduler._pool, 0
    while engine.has_work:
        before = runner.steps
        engine.step()
        places += pool.used * runner.block_size * (runner.steps - before)
    return {"steps": runner.steps, "wasted": round(1 - runner.tokens / places, 4)}


def host(options: argparse.Namespace) -> dict[str, Any]:
    """Peak resident sizes in MiB of the worker and its engine, and the most jobs that were running."""
    most = str(options.max_sequences)
    with durable_client(sqlite=False, model=demo_model(), max_sequences=options.max_sequences) as (
        client,
        home,
    ):
        command = [*instant_worker.COMMAND, "--max-sequences", most]
        with running_worker(client, home / "instant.log", command=command) as process:
            family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
            peaks = [PeakMemory(pid) for pid in family]
            client.enqueue_many(prompts(options.jobs, WORDS, TOKENS, 0), batch="host", ignore_eos=True)
            running = [0]
            while (states := client.stats("host")["state"]) != {"succeeded": options.jobs}:
                running.append(states.get("running", 0))
                time.sleep(0.1)
            rss = [round(peak.stop() / 2**20) for peak in peaks]
    return {"jobs": options.jobs, "in_flight": max(running), "peak_rss_mib": rss}


MEASUREMENTS = {"pages": pages, "host": host}


def main() -> None:
    """Measure what is asked for."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("measurements", nargs="*", default=list(MEASUREMENTS))
    arguments.add_argument("--jobs", type=int, default=8192)
    arguments.add_argument("--max-sequences", type=int, default=4096)
    options = arguments.parse_args()
    for name in options.measurements:
        print(json.dumps({"measured": name} | MEASUREMENTS[name](options)), flush=True)


if __name__ == "__main__":
    main()
