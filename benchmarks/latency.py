"""How soon the first piece of a streamed answer comes, idle and while a night fills the worker.

    python -m benchmarks.latency MODEL.gguf [--sequences 1092] [--requests 200] [--rate 10] [--sqlite]
                                            [--step-ms 6]

A real server, a real worker, Redis and PostgreSQL (durable, all started here). First POST /execute one after
the other, then at random moments while batch rows run in all slots that batches may have. Prints percentiles
of the first piece (from the request to the client), of the gaps between pieces, and of the parts of both, as
Markdown for RESULTS.md. The parts are told by the worker's processes, which run this module. With --step-ms
nothing is computed, and a step takes so long: what remains is the host's, and needs no GPU.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.common.servers import durable_client
from benchmarks.nightly import prompts
from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.streams.redis import Followers
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.sizes import interactive_slots, max_sequences
from nightmill.worker.commands.process import running_worker
from nightmill.worker.engine.engine import Engine
from nightmill.worker.link.messages import Submit
from nightmill.worker.link.process import _Loop
from nightmill.worker.runners.base import Drawn, StepBatch
from nightmill.worker.service.publishing import Publisher
from nightmill.worker.service.shards import Service
from tests.support.instant_worker import CONTEXT, InstantRunner
from tests.support.own_engine import engine_on, run_module
from tests.support.servers import free_port, wait_until, worker_env

NAME = "benchmarks.latency"
MARKS = "LATENCY_MARKS"
STEP = "LATENCY_STEP_SECONDS"
ANSWER_TOKENS = 32
TEXT_TOKENS = range(64, 80)
"""Letters in vocabularies of bytes. With random weights most tokens that are drawn would not be text."""
PARTS = {
    "handed in": "from the request until the server makes the row",
    "message": "the row's commit and the way through Redis",
    "claim": "claimed, tokenised, given to the engine's process",
    "taken": "the engine takes it, which is between two steps",
    "first token": "steps that were queued, its prompt, its first token",
    "told": "the text on its way to Redis",
    "client": "from Redis through the server",
}
WAY = {
    "piece: to the worker's main process": "told by the engine's process, until it is taken in there",
    "piece: to Redis": "until the publisher begins to send it",
    "piece: to the client": "through Redis and the server",
}


def main() -> None:
    """Measure idle, then by night."""
    if MARKS in os.environ:
        return timed_worker()
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, default=1092)
    parser.add_argument("--idle", type=int, default=50, help="requests before the night")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--rows", type=int, default=20_000, help="of the night, which may be longer")
    parser.add_argument("--tokens", type=int, nargs=2, default=(64, 256), help="bounds of a row's max_tokens")
    parser.add_argument("--words", type=int, nargs=2, default=(50, 400), help="bounds of a row's prompt")
    parser.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    parser.add_argument("--step-ms", type=float, help="of a runner that computes nothing")
    options = parser.parse_args()
    if options.step_ms is not None:
        os.environ[STEP] = str(options.step_ms / 1000)
    settings = {"model": options.model, "max_sequences": options.sequences, "drain_seconds": 0.0}
    with durable_client(sqlite=options.sqlite, **settings) as (client, home):
        os.environ[MARKS] = str(home / "marks.jsonl")
        batch_slots = max_sequences(client.settings) - interactive_slots(client.settings)
        with (
            serving(client, home) as url,
            running_worker(client, home / "worker.log", command=(sys.executable, "-m", NAME)),
        ):
            warm = asyncio.run(asked(url, 5, None))
            assert all(len(one) > 2 for one in warm), warm
            report("idle", asyncio.run(asked(url, options.idle, None)), home / "marks.jsonl")
            night = prompts(options.rows, options.words, options.tokens, 1)
            feeder = threading.Thread(target=lambda: client.enqueue_many(night, ignore_eos=True), daemon=True)
            feeder.start()
            running = wait_until(lambda: _running(client, batch_slots), timeout=120)
            found = asyncio.run(asked(url, options.requests, options.rate))
            report(f"{running} batch rows running", found, home / "marks.jsonl")
            print(f"\nat the end of it: {_states(client)}")
        print((home / "worker.log").read_text()[-1500:], file=sys.stderr)
    return None


def _running(client: Client, least: int) -> int | None:
    running = client.store.counts()["state"].get(JobState.RUNNING, 0)
    return running if running >= least else None


def _states(client: Client) -> dict[str, int]:
    return client.store.counts()["state"]


@contextmanager
def serving(client: Client, home: Path) -> Iterator[str]:
    """A server in a process of its own; its address."""
    port = free_port()
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nightmill", "serve", "--port", str(port)],
            env=worker_env(client.settings), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            with suppress(httpx2.TransportError):
                return httpx2.get(f"{url}/health").status_code == 200
            return False

        wait_until(answers)
        yield url
    finally:
        process.terminate()
        process.wait(60)


# -- asking --------------------------------------------------------------------------------------


async def asked(url: str, count: int, rate: float | None) -> list[dict[str, Any]]:
    """Answers to so many requests, as `one` gives them: one after the other, or `rate` a second at random."""
    draw = random.Random(count)
    async with httpx2.AsyncClient(
        base_url=url, timeout=120, limits=httpx2.Limits(max_connections=None)
    ) as http:
        if rate is None:
            return [await one(http, number) for number in range(count)]
        tasks = []
        for number in range(count):
            tasks.append(asyncio.ensure_future(one(http, number)))
            await asyncio.sleep(draw.expovariate(rate))
        return await asyncio.gather(*tasks)


async def one(http: httpx2.AsyncClient, number: int) -> dict[str, Any]:
    """When a request was sent, when its pieces came, and what its row says."""
    body = {
        "prompt": f"{number}: tell me of the {number}th night.",
        "max_tokens": ANSWER_TOKENS, "ignore_eos": True,
        "logit_bias": {str(token): 100 for token in TEXT_TOKENS},
    }  # fmt: skip
    sent, pieces, places, data = time.time(), [], [], {}
    async with http.stream("POST", "/execute", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if "t" in data:
                    pieces.append(time.time())
                    places.append(data["i"])
    assert data.get("state") == "succeeded", data
    return {"job": data["job_id"], "sent": sent, "pieces": pieces, "places": places, "end": data} | {
        name: datetime.fromisoformat(data[name]).timestamp() for name in ("created_at", "started_at")
    }


# -- a worker that says when -----------------------------------------------------------------------


class PacedRunner(InstantRunner):
    """Computes nothing, and has two steps queued, each of which is over so long after the one before."""

    depth = 2

    def __init__(self, vocab: int, slots: int, seconds: float) -> None:
        super().__init__(vocab, slots)
        self._seconds = seconds
        self._over: deque[float] = deque()

    def launch(self, batch: StepBatch) -> None:
        """Begin when the step before is over."""
        super().launch(batch)
        begin = max(time.perf_counter(), self._over[-1] if self._over else 0.0)
        self._over.append(begin + self._seconds)

    def collect(self) -> Drawn | None:
        """Wait until the oldest step is over."""
        if self._over:
            time.sleep(max(0.0, self._over.popleft() - time.perf_counter()))
        return super().collect()


def build(settings: Settings, model: OpenModel) -> Engine:
    """The real engine, or one that computes nothing."""
    if STEP not in os.environ:
        return build_engine(settings, model)
    runner = PacedRunner(model.spec.vocab, max_sequences(settings), float(os.environ[STEP]))
    return engine_on(runner, settings, model, context=CONTEXT, interactive=interactive_slots(settings))


def timed_worker() -> None:
    """A worker whose processes leave (what, moment, job) in the file that MARKS names."""
    with Path(os.environ[MARKS]).open("a", buffering=1) as file:

        def mark(what: str, job: object, moment: float | None = None) -> None:
            file.write(json.dumps([what, moment or time.time(), job]) + "\n")

        _wrap(
            Service,
            "take",
            lambda _, ids, interactive=False: interactive and [mark("message", one) for one in ids],
        )
        _wrap(
            Service, "_submit",
            lambda _, requests: [mark("claim", one.job_id) for one in requests if one.interactive],
        )  # fmt: skip
        _wrap(
            Publisher,
            "grown",
            lambda _, deltas: [mark("grown", [one.job_id, one.start]) for one in deltas],
        )
        _wrap(
            Followers,
            "send",
            lambda _, parts: [
                mark("sending", [one.line.partition(":")[0], one.start])
                for own in parts.values()
                for one in own
                if one.text is not None
            ],
        )
        _wrap(
            _Loop, "_carry_out",
            lambda _, command: isinstance(command, Submit)
            and [mark("taken", one.job_id) for one in command.requests if one.interactive],
        )  # fmt: skip
        deltas = Engine.deltas

        def told(engine: Engine) -> Any:
            grown = deltas(engine)
            for delta in grown:
                mark("told", [delta.job_id, delta.start])
            return grown

        Engine.deltas = told  # type: ignore[method-assign]
        step, last = Engine.step, [0.0]

        def stepped(engine: Engine) -> Any:
            done = step(engine)
            now = time.time()
            mark("step", round(now - last[0], 5), now)
            last[0] = now
            return done

        Engine.step = stepped  # type: ignore[method-assign]
        run_module(NAME, build)


def _wrap(owner: Any, name: str, before: Callable[..., object]) -> None:
    call = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        before(*arguments, **keywords)
        return call(*arguments, **keywords)

    setattr(owner, name, wrapped)


# -- what is printed -----------------------------------------------------------------------------


def report(title: str, found: Sequence[dict[str, Any]], marks: Path) -> None:
    """A table of one phase."""
    moments: dict[object, dict[str, float]] = defaultdict(dict)  # by job, or by piece: job and place
    steps = []
    silent = [one for one in found if not one["pieces"]]  # random weights may draw what is no text
    found = [one for one in found if one["pieces"]]
    print(f"\n{title}: {len(found)} requests, and {len(silent)} whose answers have no text", flush=True)
    if silent:
        print(silent[0]["end"], flush=True)
    if not found:
        return
    begin, end = found[0]["sent"], max(one["pieces"][-1] for one in found)
    for line in marks.read_text().splitlines():
        what, moment, job = json.loads(line)
        if what != "step":
            moments[tuple(job) if isinstance(job, list) else job].setdefault(what, moment)
        elif begin <= moment <= end:
            steps.append(job)
    values: dict[str, list[float]] = defaultdict(list)
    for one in found:
        known = moments[one["job"]]
        begun = moments[one["job"], 0]
        places = [
            one["sent"], one["created_at"], known["message"], known["claim"], known["taken"],
            begun["told"], begun["grown"], one["pieces"][0],
        ]  # fmt: skip
        for name, before, after in zip(PARTS, places[:-1], places[1:], strict=True):
            values[name].append(after - before)
        values["first piece"].append(one["pieces"][0] - one["sent"])
        values["created to claimed (the row's times)"].append(one["started_at"] - one["created_at"])
        values["gap between pieces"] += [after - before for before, after in pairwise(one["pieces"])]
        # The last piece may be of the row: nobody told it.
        way = [
            (moments[one["job"], place], came)
            for place, came in zip(one["places"], one["pieces"], strict=True)
        ]
        way = [(piece, came) for piece, came in way if "sending" in piece]
        values["of it: between tellings"] += [
            after["told"] - before["told"] for (before, _), (after, _) in pairwise(way)
        ]
        for piece, came in way:
            stops = [piece["told"], piece["grown"], piece["sending"], came]
            for name, before, after in zip(WAY, stops[:-1], stops[1:], strict=True):
                values[name].append(after - before)
    values["step of the engine"] = steps
    print("\n| ms | p50 | p90 | p99 | most |")
    print("| --- | --- | --- | --- | --- |")
    for name, seconds in values.items():
        seconds.sort()
        shown = [
            seconds[min(len(seconds) - 1, len(seconds) * part // 100)] * 1000 for part in (50, 90, 99, 100)
        ]
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in shown) + " |")
    print(f"\npieces of an answer: {sum(len(one['pieces']) for one in found) / len(found):.1f}", flush=True)


if __name__ == "__main__":
    main()
