"""Memory that must not grow: of a server that strangers abuse, of an engine after thousands of steps.

    python -m benchmarks.endurance [--part idle | slow | large | malformed | forged ...] [--scale 1.0]
    python -m benchmarks.endurance --part engine [--model MODEL.gguf] [--steps 20000]

A real `nightmill serve` with keys, on Redis and SQLite of its own, and no worker. For each kind of abuse: how
the server answered, its memory before, at most and afterwards, and how long GET /health took for others.
Prints Markdown for RESULTS.md; fails if the server has died, failed or grown without bound. Needs no GPU; all
parts take some ten minutes on two cores, and a tenth of that with --scale 0.1.

engine, which needs a GPU: requests of all lengths come and go, some are cancelled, pages run short, so that
sequences are preempted. Prints a JSON line with the delta of memory on the device and on the host, and the
seconds that it took.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.common.abuse import KEYS, PARTS, Server, posting
from benchmarks.common.servers import durable_client
from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.client.client import Client
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.spec import JobSpec
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.servers import free_port, wait_until, worker_env

MOST_GROWTH = 256 << 20
"""Bytes that the server's memory may grow by in any part."""
ENGINE = "engine"
SLOTS, CONTEXT = 16, 512
PAGES = SLOTS * CONTEXT // 16 // 3  # a third of what full contexts take: preemption is certain


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=(*PARTS, ENGINE))
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers")
    parser.add_argument("--model", type=Path, default=demo_model(), help=f"of the part {ENGINE}")
    parser.add_argument("--steps", type=int, default=20_000, help=f"of the part {ENGINE}")
    options = parser.parse_args()
    chosen = options.part or [*PARTS]
    if parts := [name for name in chosen if name != ENGINE]:
        abuse(parts, options.scale)
    if ENGINE in chosen:
        print(json.dumps(engine_steps(options.model, options.steps)))


def abuse(parts: list[str], scale: float) -> None:
    """These parts on one server."""
    print("| | answers | took | MiB before / most / after | ms of /health p50 / p99 |")
    print("| --- | --- | --- | --- | --- |")
    with durable_client(sqlite=True) as (client, home):
        alices = client.enqueueing.enqueue_spec(JobSpec.parse("A secret"), owner="alice")
        port = free_port()
        environment = worker_env(
            client.settings, api_keys=",".join(f"{name}={key}" for name, key in KEYS.items())
        )
        with (home / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "nightmill", "serve", "--port", str(port)],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            server = Server(psutil.Process(process.pid), port)
            wait_until(lambda: _lives(server))
            for name in parts:
                asyncio.run(measure(name, server, scale))
            asyncio.run(_knows_nothing(server, client, alices))
            print(f"\nlog of the server: {(home / 'server.log').stat().st_size:,} bytes")
        finally:
            process.terminate()
            process.wait(60)


async def measure(name: str, server: Server, scale: float) -> None:
    """One part; prints a row of the table."""
    says, part = PARTS[name]
    before, began = server.memory(), time.monotonic()
    server.answers, server.most, server.health = Counter(), before, []
    watching = asyncio.ensure_future(_watch(server))
    try:
        await part(server, scale)
    finally:
        watching.cancel()
    seconds = time.monotonic() - began
    await asyncio.sleep(1.0)
    assert _lives(server), "the server does not answer any more"
    after = server.memory()
    health = sorted(server.health)
    answers = ", ".join(f"{count:,} {what}" for what, count in sorted(server.answers.items()))
    p50, p99 = (health[min(len(health) - 1, len(health) * part // 100)] * 1000 for part in (50, 99))
    sizes = " / ".join(f"{size / 2**20:.0f}" for size in (before, server.most, after))
    print(f"| {says} | {answers} | {seconds:.0f} s | {sizes} | {p50:.0f} / {p99:.0f} |", flush=True)
    assert server.most - before < MOST_GROWTH, "the server grew without bound"
    failed = [what for what in server.answers if what.startswith("5") and what != "503"]
    assert not failed, f"the server failed: {failed}"


async def _watch(server: Server) -> None:
    """Ask as somebody else does, and look at the memory."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        while True:
            began = time.monotonic()
            with suppress(httpx2.TransportError):
                await http.get("/health")
            server.health.append(time.monotonic() - began)
            server.memory()
            await asyncio.sleep(0.05)


def _lives(server: Server) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{server.url}/health", timeout=30).status_code == 200
    return False


async def _knows_nothing(server: Server, client: Client, alices: str) -> None:
    """Another's job is as unknown as one that never was, and still hers."""
    async with posting(server) as http:
        answers = [await http.get(f"/v1/jobs/{job_id}") for job_id in (alices, IdSource().draw())]
        assert [answer.status_code for answer in answers] == [404, 404]
        said = [answer.json()["error"]["message"].partition("'")[0] for answer in answers]
        assert said[0] == said[1], said
    assert client.get(alices).owner == "alice"


# -- the engine ----------------------------------------------------------------------------------


def engine_steps(model: Path, steps: int) -> dict[str, Any]:
    """So many steps on the GPU; memory is read when a tenth is done and at the end."""
    file = GgufFile.open(model)
    spec = read_spec(file)
    tokenizer = Tokenizer.from_gguf(file)
    runner = CudaRunner(
        file,
        spec,
        RunnerSizes(slots=SLOTS, context=CONTEXT, depth=3, max_tokens=2048, kv_pages=PAGES),
    )
    engine = Engine(
        runner,
        Detokenizer(text_stream=lambda: tokenizer.stream(continues=True), eos_ids=tokenizer.eos_ids),
        EngineSizes(context_length=CONTEXT, max_sequences=SLOTS, token_budget=2048),
    )
    draw = random.Random(0)
    submitted = finished = 0
    readings: list[tuple[int, int]] = []
    began = time.perf_counter()
    while engine.stats.steps < steps:
        while engine.running + engine.waiting < 2 * SLOTS:
            engine.submit(_request(draw, submitted, spec.vocab))
            submitted += 1
        if draw.random() < 0.002:
            engine.cancel(f"job-{draw.randrange(max(0, submitted - 2 * SLOTS), submitted)}")
        finished += len(engine.step())
        if len(readings) == 0 and engine.stats.steps >= steps // 10:
            readings.append(_memory(runner))
    readings.append(_memory(runner))
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
    engine.close()
    return report


def _request(draw: random.Random, number: int, vocab: int) -> Request:
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


def _memory(runner: CudaRunner) -> tuple[int, int]:
    """Free bytes on the device, resident bytes of this process."""
    return runner.device.free_memory(), psutil.Process().memory_info().rss


if __name__ == "__main__":
    main()
