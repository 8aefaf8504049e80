"""Calls of the flex tier in bulk, and how soon the first piece of an interactive answer comes beside them.

    python -m benchmarks.flex MODEL.gguf [--calls 20000] [--connections 64] [--max-tokens 64] [--instant]

A real server, a real worker, durable Redis and SQLite, all started here. First 20 interactive calls
are streamed one after the other, then one at a time beside `--calls` flex calls from `--connections`
connections. Prints one JSON line: statuses of both, flex calls a second, and percentiles of the time from an
interactive call to its first piece, alone and beside. Fails if any call ends otherwise than by 200. With
--instant nothing is computed, which needs no GPU. 20,000 calls take two to four minutes.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx2
import numpy as np

from benchmarks.common.servers import durable_client
from nightmill.worker.commands.process import running_worker
from tests.support import instant_worker
from tests.support.flex import DAY, NIGHT, Answers, body, flex_calls, http_client, running_server

ALONE = 20
PAUSE_SECONDS = 0.1


async def measure(url: str, options: argparse.Namespace) -> tuple[Answers, float, list[float], list[float]]:
    """Statuses of flex calls, their seconds, and the interactive calls' to the first piece: alone, beside."""
    async with (
        http_client(url, DAY, 1) as day,
        http_client(url, NIGHT, options.connections) as night,
    ):
        alone = [await first_piece(day, number) for number in range(ALONE)]
        began = time.perf_counter()
        flood = asyncio.ensure_future(
            flex_calls(night, options.calls, options.connections, options.max_tokens, said(began))
        )
        beside = []
        while not flood.done():
            beside.append(await first_piece(day, ALONE + len(beside)))
            await asyncio.sleep(PAUSE_SECONDS)
        return await flood, time.perf_counter() - began, alone, beside


def said(began: float) -> Callable[[int], None]:
    """Says every 1,000 calls how far the flood is."""

    def report(ended: int) -> None:
        if ended % 1000 == 0:
            sys.stderr.write(f"{ended:,} calls in {time.perf_counter() - began:.0f} s\n")

    return report


async def first_piece(client: httpx2.AsyncClient, number: int) -> float:
    """Seconds until the first piece of text of a streamed answer, which is read to its end."""
    request = body(number, 16) | {"stream": True}
    began, first = time.perf_counter(), None
    async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if first is None and line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if any(choice["delta"].get("content") for choice in choices):
                    first = time.perf_counter() - began
    return time.perf_counter() - began if first is None else first


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Some of them, in milliseconds."""
    return {
        f"p{share}" if share < 100 else "max": round(1000 * float(np.percentile(seconds, share)), 1)
        for share in (50, 95, 99, 100)
    }


def main() -> None:
    """Start everything, call, and print."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--calls", type=int, default=20_000)
    arguments.add_argument("--connections", type=int, default=64)
    arguments.add_argument("--max-tokens", type=int, default=64)
    arguments.add_argument("--max-sequences", type=int, default=256)
    arguments.add_argument("--instant", action="store_true")
    options = arguments.parse_args()
    place = {} if options.instant else {"gpu": 0}
    command = {"command": instant_worker.COMMAND} if options.instant else {}
    sequences = [] if options.instant else ["--max-sequences", str(options.max_sequences)]
    with (
        durable_client(sqlite=True, model=options.model, **place) as (client, home),
        running_worker(client, home / "worker.log", sequences, **command),
        running_server(client, home / "server.log") as url,
    ):
        flex, seconds, alone, beside = asyncio.run(measure(url, options))
    statuses = Counter({f"{status} {tier}": count for (status, tier), count in flex.items()})
    found = {
        "flex": dict(statuses),
        "flex_per_second": round(flex.total() / seconds, 1),
        "interactive": len(beside),
        "alone_ms": percentiles(alone),
        "beside_ms": percentiles(beside),
    }
    print(json.dumps(found), flush=True)
    if set(flex) != {(200, "flex")}:
        raise SystemExit("calls ended otherwise than by 200 of the flex tier")


if __name__ == "__main__":
    main()
