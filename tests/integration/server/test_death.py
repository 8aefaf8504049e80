"""A server is killed in the middle of streams and of a batch. Another is there, and nothing is lost."""

import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.jobs import chunked
from nightmill.worker.runners.base import StepBatch
from tests.support.servers import http_process, wait_until
from tests.unit.server.conftest import listening, text_of
from tests.unit.worker.bench import Bench, Pausing, stop

ROWS = 2500
READERS = 7  # with the other one as many as run at once
ASKED: dict[str, Any] = {"prompt": "Once", "max_tokens": 120, "ignore_eos": True}


class Paced(Pausing):
    """Takes its time, and waits before the last quarter of the texts: nobody ends before the server does."""

    pause_at = 90

    def launch(self, batch: StepBatch) -> None:
        time.sleep(0.01)  # the worker has to learn meanwhile who follows what
        super().launch(batch)


class Reader(threading.Thread):
    """Reads a text at the first server, and where it stopped goes on at the second."""

    def __init__(self, seed: int, first: str, second: "Future[str]", asked: Callable[[str], object]) -> None:
        super().__init__(daemon=True)
        self.seed = seed
        self.job_id = ""
        self.text = ""
        self.broken = 0
        self.end: dict[str, Any] = {}
        self._first = first
        self._second = second
        self._asked = asked
        self._last: dict[str, str] = {}

    def run(self) -> None:
        with httpx2.Client(timeout=240) as http:
            try:
                with http.stream(
                    "POST", f"{self._first}/execute", json=ASKED | {"seed": self.seed}
                ) as answer:
                    self.job_id = answer.headers["x-request-id"]
                    self._asked(self.job_id)
                    self._read(answer)
            except httpx2.TransportError:
                self.broken += 1
                url = f"{self._second.result(120)}/v1/jobs/{self.job_id}/events"
                with http.stream("GET", url, headers=self._last) as answer:
                    self._read(answer)

    def _read(self, answer: httpx2.Response) -> None:
        for line in answer.iter_lines():
            if line.startswith("id: "):
                place = line.removeprefix("id: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                if "t" not in data:
                    self.end = data
                    return
                self.text += data["t"]
                self._last = {"Last-Event-ID": place}


class OpenAIReader(threading.Thread):
    """Reads with OpenAI's client, which cannot go on elsewhere."""

    def __init__(self, server: str, asked: Callable[[str], object]) -> None:
        super().__init__(daemon=True)
        self.pieces = 0
        self.job_id = ""
        self.error: Exception | None = None
        self._client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
        self._asked = asked

    def run(self) -> None:
        try:
            stream = self._client.completions.create(
                model="model", prompt="Once", max_tokens=120, seed=99, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            self.job_id = stream.response.headers["x-request-id"]
            self._asked(self.job_id)
            for _ in stream:
                self.pieces += 1
        except (openai.APIError, httpx2.TransportError) as error:
            self.error = error


def test_streams_and_a_batch_outlive_the_server_that_had_them(
    sqlite_settings: Settings, tmp_path: Path
) -> None:
    settings = sqlite_settings.model_copy(update={"stale_seconds": 2.0})
    with Client(settings) as client, ExitStack() as later:
        runner = Paced()
        bench = Bench(client, runner)
        beating = threading.Event()
        threading.Thread(target=lambda: _beat(bench, beating), daemon=True).start()
        try:
            address, killed = later.enter_context(http_process(settings, tmp_path / "log"))
            here = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
            second: Future[str] = Future()

            asked: list[str] = []
            readers = [Reader(seed, address, second, asked.append) for seed in range(READERS)]
            unable = OpenAIReader(address, asked.append)
            for reader in (unable, *readers):
                reader.start()
            wait_until(lambda: len(asked) == READERS + 1)
            bench.run(asked)
            wait_until(lambda: unable.pieces and all(reader.text for reader in readers))
            file = here.files.create(file=("rows", _rows()), purpose="batch")
            batch = here.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            wait_until(lambda: here.batches.retrieve(batch.id).request_counts.total)  # type: ignore[union-attr]
            killed.send_signal(signal.SIGKILL)
            killed.wait(120)
            runner.gate.set()
            second.set_result(f"http://127.0.0.1:{later.enter_context(listening(client, None))}")
            beside = here.with_options(base_url=f"{second.result()}/v1")
            assert beside.batches.retrieve(batch.id).status in ("validating", "in_progress")

            for reader in readers:
                reader.join(240)
                assert (reader.broken, reader.end["state"]) == (1, "succeeded")
                assert reader.text == text_of(reader.seed, max_tokens=120, ignore_eos=True)
            unable.join(240)
            assert unable.error is not None and "connection" in str(unable.error).lower()
            client.wait(unable.job_id, timeout=240)
            assert client.get(unable.job_id).text == text_of(99, max_tokens=120, ignore_eos=True)

            wait_until(lambda: beside.batches.retrieve(batch.id).status == "in_progress")
            claims = Claims(client.database, "b" * 32)
            claims.register("host", 2, "model", None)
            for ids in chunked(client.batches.store.ids(batch.id, JobState.QUEUED)):
                claims.finish(
                    [
                        Outcome(one.job_id, one.attempt, StopReason.EOS, "text", 1, 2)
                        for one in claims.claim(ids)
                    ]
                )
            wait_until(lambda: beside.batches.retrieve(batch.id).status == "completed")
            output = beside.batches.retrieve(batch.id).output_file_id
            assert output is not None
            done = [json.loads(line)["custom_id"] for line in beside.files.content(output).text.splitlines()]
            assert done == [f"r{number}" for number in range(ROWS)]
        finally:
            beating.set()
            runner.gate.set()
            stop(bench)


def _rows() -> bytes:
    return b"".join(
        json.dumps(
            {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
        ).encode()
        + b"\n"
        for number in range(ROWS)
    )


def _beat(bench: Bench, over: threading.Event) -> None:
    while not over.wait(0.2):
        bench.claims.beat(WorkerState.READY)
