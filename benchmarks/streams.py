"""Many streams at once over HTTP, and streams and a batch while everything is killed in turn.

    python -m benchmarks.streams [--streams 1000] [--deadly 200] [--rows 500] [--model MODEL.gguf]

A real server, a real worker, Redis and PostgreSQL (durable, all started here). First so many streams are
opened together, some of which do not read for a while: each must have the text of its row, and the server's
memory is measured. Then fewer, and a batch, while server, worker and Redis are killed (SIGKILL) one after the
other and started again: a reader that is cut off comes again with the id of its last piece. Every stream must
end with the text of its row, and the batch must be whole. Prints a line of JSON for each.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import psutil

from nightmill.jobs.batch_status import BatchState
from nightmill.jobs.client import Client
from nightmill.jobs.settings import Settings
from nightmill.worker.link.loading import demo_model
from tests.servers import RedisServer, free_port, start_postgres, start_redis, wait_until, worker_env

TOKENS = 24
SLOW = 20  # of the streams: one in so many does not read for SLOW_SECONDS
SLOW_SECONDS = 5.0
PATIENCE = 240.0
_AGAIN_SECONDS = 0.5


class World:
    """Processes that can be killed and are started again."""

    def __init__(self, settings: Settings, home: Path, redis: RedisServer) -> None:
        self.settings = settings
        self.redis = redis
        self.port = free_port()
        self._home = home
        self._log = (home / "log").open("wb")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The server's."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str) -> None:
        """`server` or `worker`."""
        arguments = ["serve", "--port", str(self.port)] if name == "server" else ["worker"]
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "nightmill", *arguments],
            env=worker_env(self.settings), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """SIGKILL, and start again."""
        if name == "redis":
            self.redis.restart()
            return
        self.processes[name].kill()
        self.processes[name].wait()
        self.start(name)

    def ready(self) -> bool:
        """Whether server and worker are there."""
        with suppress(httpx2.TransportError):
            return httpx2.get(f"{self.url}/ready").status_code == 200
        return False

    def stop(self) -> None:
        """All of it."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._log.close()


class Stream:
    """One reader, which comes again until its text has ended."""

    def __init__(self, number: int, slow: float = 0.0) -> None:
        self.text = ""
        self.end: dict[str, Any] = {}
        self.first = self.seconds = 0.0
        self.broken = 0
        self._slow = slow
        self._job_id = ""
        self._last: dict[str, str] = {}
        self._body = {
            "job_id": f"stream-{time.time()}-{number}", "prompt": f"{number}: once upon a time",
            "max_tokens": TOKENS, "ignore_eos": True,
        }  # fmt: skip

    async def read(self, http: httpx2.AsyncClient) -> None:
        """To the end; raises AssertionError for an answer that is neither a stream nor worth another try."""
        began = time.monotonic()
        while not self.end:
            assert time.monotonic() < began + PATIENCE, f"{self._job_id or self._body} has not ended"
            try:
                await self._once(http, began)
            except httpx2.TransportError:
                self.broken += 1
                await asyncio.sleep(_AGAIN_SECONDS)
        self.seconds = time.monotonic() - began

    async def _once(self, http: httpx2.AsyncClient, began: float) -> None:
        ours = (
            http.stream("GET", f"/v1/jobs/{self._job_id}/events", headers=self._last)
            if self._last
            else http.stream("POST", "/execute", json=self._body)
        )
        async with ours as answer:
            if answer.status_code in (429, 503):  # no worker, no Redis or too many: it says to come again
                self.broken += 1
                await asyncio.sleep(_AGAIN_SECONDS)
                return
            assert answer.status_code == 200, await answer.aread()
            self._job_id = self._job_id or answer.headers["x-request-id"]
            place = ""
            if self._slow:
                await asyncio.sleep(self._slow)
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    place = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                    if "t" not in data:
                        self.end = data
                        return
                    self.first = self.first or time.monotonic() - began
                    assert data["i"] == len(self.text), "a piece is missing, or came twice"
                    self.text += data["t"]
                    self._last = {"Last-Event-ID": place}

    def check(self, client: Client) -> None:
        """Raises AssertionError unless it ended with its row's text."""
        assert self.end.get("state") == "succeeded", self.end
        job = client.get(self.end["job_id"])
        assert job.text == self.text and job.completion_tokens == TOKENS, (job.text, self.text)


async def together(world: World, streams: list[Stream], *, during: Callable[[], None] = lambda: None) -> None:
    """Open all at once, and read them; `during` runs on a thread."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=world.url, timeout=PATIENCE, limits=limits) as http:
        await asyncio.gather(asyncio.to_thread(during), *(stream.read(http) for stream in streams))


def many(world: World, client: Client, count: int) -> dict[str, Any]:
    """All at once, some of which do not read for a while."""
    server = psutil.Process(world.processes["server"].pid)
    before = most = server.memory_info().rss
    streams = [Stream(number, SLOW_SECONDS if number % SLOW == 0 else 0.0) for number in range(count)]
    over: list[bool] = []

    def watch() -> None:
        nonlocal most
        while not over and any(not stream.end for stream in streams):
            most = max(most, server.memory_info().rss)
            time.sleep(0.1)

    asyncio.run(together(world, streams, during=watch))
    for stream in streams:
        stream.check(client)
    first, whole = (sorted(getattr(one, name) for one in streams) for name in ("first", "seconds"))
    return {
        "streams": count,
        "not reading for 5 s": len(range(0, count, SLOW)),
        "lost": 0,
        "first piece, median and last, s": [round(first[count // 2], 2), round(first[-1], 2)],
        "end, median and last, s": [round(whole[count // 2], 2), round(whole[-1], 2)],
        "server, MiB before and most": [before >> 20, most >> 20],
        "refused at first, and tried again": sum(one.broken for one in streams),
    }


def deadly(world: World, client: Client, count: int, rows: int) -> dict[str, Any]:
    """Streams and a batch, while server, worker and Redis are killed."""
    batch = client.submit_batch(
        [{"prompt": f"{number}:", "max_tokens": 8, "ignore_eos": True} for number in range(rows)]
    )
    streams = [Stream(count + number) for number in range(count)]
    killed: list[str] = []
    draw = random.Random(count)

    def kill() -> None:
        for name in ("server", "worker", "redis"):
            reading = sum(bool(stream.text) and not stream.end for stream in streams)
            give_up_at = time.monotonic() + 30
            while not reading and time.monotonic() < give_up_at:  # until some are in the middle
                time.sleep(0.05)
                reading = sum(bool(stream.text) and not stream.end for stream in streams)
            time.sleep(draw.uniform(0.1, 0.5))
            world.kill(name)
            killed.append(f"{name}, {reading} streams in the middle")

    began = time.monotonic()
    asyncio.run(together(world, streams, during=kill))
    seconds = time.monotonic() - began
    for stream in streams:
        stream.check(client)
    state = batch.wait(timeout=PATIENCE).state
    assert state is BatchState.COMPLETED, state
    assert len(list(batch.results())) == rows
    return {
        "streams": count,
        "killed": killed,
        "ended with the text of their row": count,
        "times that readers came again": sum(stream.broken for stream in streams),
        "rows of the batch that succeeded": rows,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Both parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--deadly", type=int, default=200)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--model", type=Path, default=demo_model())
    options = parser.parse_args()
    with ExitStack() as stack:
        postgres = stack.enter_context(start_postgres(durable=True))
        home = Path(stack.enter_context(TemporaryDirectory(prefix="nightmill-bench-")))
        redis = stack.enter_context(start_redis(home / "redis", durable=True))
        settings = Settings(
            data_dir=home, database_url=postgres.create_database(), broker_url=redis.url,
            model=options.model, stale_seconds=4.0, heartbeat_seconds=1.0,
        )  # fmt: skip
        client = stack.enter_context(Client(settings))
        client.database.migrate()
        world = World(settings, home, redis)
        stack.callback(world.stop)
        for name in ("server", "worker"):
            world.start(name)
        wait_until(world.ready, timeout=120)
        if options.streams:
            print(json.dumps(many(world, client, options.streams)), flush=True)
        if options.deadly:
            print(json.dumps(deadly(world, client, options.deadly, options.rows)), flush=True)


if __name__ == "__main__":
    main()
