"""Many steps on the GPU: does memory grow, on the device or on the host?

    python -m benchmarks.endurance [MODEL.gguf] [--steps 100000]

Requests of all lengths come and go, some are cancelled, pages run short so that sequences are preempted.
Prints one JSON line.
"""

import argparse
import json
import random
import time

import psutil

from nightmill.jobs.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request
from nightmill.worker.link.loading import demo_model
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.gpu.runner import CudaRunner

SLOTS = 16
CONTEXT = 512
PAGES = SLOTS * CONTEXT // 16 // 3  # a third of what full contexts take: preemption is certain


def main() -> None:
    """Run the steps; memory is read when a tenth is done and at the end."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model", nargs="?", default=str(demo_model()))
    arguments.add_argument("--steps", type=int, default=100_000)
    options = arguments.parse_args()
    file = GgufFile.open(options.model)
    spec = read_spec(file)
    tokenizer = Tokenizer.from_gguf(file)
    runner = CudaRunner(file, spec, kv_blocks=PAGES, slots=SLOTS, depth=3, context=CONTEXT, max_tokens=2048)
    engine = Engine(
        runner,
        text_stream=lambda: tokenizer.stream(continues=True),
        eos_ids=tokenizer.eos_ids,
        context_length=CONTEXT,
        max_sequences=SLOTS,
        token_budget=2048,
    )
    draw = random.Random(0)
    submitted = finished = 0
    readings: list[tuple[int, int]] = []
    began = time.perf_counter()
    while engine.stats.steps < options.steps:
        while engine.running + engine.waiting < 2 * SLOTS:
            engine.submit(request(draw, submitted, spec.vocab))
            submitted += 1
        if draw.random() < 0.002:
            engine.cancel(f"job-{draw.randrange(max(0, submitted - 2 * SLOTS), submitted)}")
        finished += len(engine.step())
        if len(readings) == 0 and engine.stats.steps >= options.steps // 10:
            readings.append(memory(runner))
    readings.append(memory(runner))
    seconds = time.perf_counter() - began
    stats = engine.stats
    engine.abandon()
    engine.check_integrity()
    assert engine.stats.free_pages == engine.stats.pages
    report = {
        "steps": stats.steps,
        "seconds": round(seconds, 1),
        "requests_finished": finished,
        "preemptions": stats.preemptions,
        "tokens_per_second": round(stats.generated_tokens / seconds),
        "vram_growth_mib": round((readings[0][0] - readings[1][0]) / 2**20, 2),
        "rss_growth_mib": round((readings[1][1] - readings[0][1]) / 2**20, 2),
    }
    print(json.dumps(report))
    engine.close()


def request(draw: random.Random, number: int, vocab: int) -> Request:
    """A request of any length, with any of the filters."""
    prompt = tuple(draw.randrange(vocab) for _ in range(draw.randint(1, 200)))
    params = GenerationParams(
        max_tokens=draw.randint(1, 300),
        temperature=draw.choice([0.0, 0.7, 1.0]),
        top_k=draw.choice([0, 0, 40]),
        top_p=draw.choice([1.0, 0.9]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.1]),
        ignore_eos=draw.choice([True, False]),
    )
    return Request(f"job-{number}", 1, prompt, params, seed=number)


def memory(runner: CudaRunner) -> tuple[int, int]:
    """Free bytes on the device, resident bytes of this process."""
    return runner.device.free_memory(), psutil.Process().memory_info().rss


if __name__ == "__main__":
    main()
