"""The ordinary life of HTTP servers beside the faults: reads, jobs, completions, streams, files, batches."""

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.campaign.fleet import Fleet
from tests.campaign.http_caller import LONGEST_SILENCE, HttpCaller, expected_of, http_item
from tests.campaign.ledger import Ledger, Promise
from tests.campaign.report import Report

BATCH_SECONDS = 90.0  # of peace, in which every batch ends and has its files
LISTS = frozenset({"/v1/jobs?limit=100", "/v1/batches", "/v1/files", "/v1/night", "/metrics"})
READS = (*sorted(LISTS), "/v1/models", "/health", "/ready")
_WAITING = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass
class HttpBatch:
    """A batch that a server has acknowledged, and what its rows must give."""

    id: str
    items: dict[str, dict[str, Any]]  # by custom_id, in order
    cancelled: bool = False


class HttpTraffic:
    """Threads that go on until `stop`; then `check_batches` looks at what was made."""

    def __init__(self, fleet: Fleet, ledger: Ledger, report: Report, seed: int) -> None:
        self._ledger = ledger
        self._report = report
        self._closing = threading.Event()
        self._batches: list[HttpBatch] = []
        self._files: list[str] = []
        loops = (self._read, self._submit, self._wait, self._stream, self._make_batches)
        self._callers = [
            HttpCaller(fleet, ledger, report, random.Random(f"{seed} http {loop.__name__}")) for loop in loops
        ]
        self._threads = [
            threading.Thread(target=self._repeat, args=(loop, caller), name=loop.__name__, daemon=True)
            for loop, caller in zip(loops, self._callers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask nothing more. A request without an answer is the judge's: it has its time."""
        self._closing.set()
        give_up_at = time.monotonic() + LONGEST_SILENCE
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    def close(self) -> None:
        """Close connections."""
        for caller in self._callers:
            caller.close()

    def check_batches(self) -> None:
        """Every batch ends in peace, with each row exactly once, in order, and its text."""
        caller = self._callers[0]
        for batch in self._batches:
            if (shown := self._ended(caller, batch)) is not None:
                self._check(caller, batch, shown)

    # -- loops -------------------------------------------------------------------------------------

    def _repeat(self, loop: Callable[[HttpCaller], None], caller: HttpCaller) -> None:
        while not self._closing.is_set():
            loop(caller)

    def _read(self, caller: HttpCaller) -> None:
        known = list(self._ledger.promises)
        paths = [*READS, *(f"/v1/jobs/{job_id}" for job_id in known[-1:])]
        path = caller.draw.choice(paths)
        caller.request("list" if path in LISTS else "read", "GET", path, 404)
        self._closing.wait(0.2)

    def _submit(self, caller: HttpCaller) -> None:
        """A job that nobody waits for: what was acknowledged must not get lost."""
        item = caller.item()
        found = caller.request("write", "POST", "/v1/jobs", json=item)
        if found is not None:
            self._ledger.promised(Promise(found.json()["id"], expected_of(item)))
            self._report.count("jobs acknowledged over HTTP")
        self._closing.wait(caller.draw.uniform(0.1, 0.8))

    def _wait(self, caller: HttpCaller) -> None:
        caller.whole(caller.item())
        self._closing.wait(caller.draw.uniform(0.1, 0.5))

    def _stream(self, caller: HttpCaller) -> None:
        caller.stream(caller.item())
        self._closing.wait(caller.draw.uniform(0.1, 0.5))

    def _make_batches(self, caller: HttpCaller) -> None:
        """An upload, a batch of it, a change of mind at times, and a look at what there is already."""
        draw = caller.draw
        items = {f"row-{number}": http_item(draw) for number in range(draw.choice((1, 7, 40)))}
        rows = "".join(
            json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": item}) + "\n"
            for name, item in items.items()
        )
        upload = {"files": {"file": ("rows.jsonl", rows.encode())}, "data": {"purpose": "batch"}}
        if (found := caller.request("upload", "POST", "/v1/files", **upload)) is not None:
            self._report.count("uploads acknowledged")
            body = {
                "input_file_id": found.json()["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            if (made := caller.request("write", "POST", "/v1/batches", json=body)) is not None:
                batch = HttpBatch(made.json()["id"], items)
                self._batches.append(batch)
                self._report.count("batches acknowledged over HTTP")
                if draw.random() < 0.15:
                    batch.cancelled = True
                    with self._ledger.intending("cancel", batch.id):
                        caller.request("write", "POST", f"/v1/batches/{batch.id}/cancel", 404, 409)
        self._closing.wait(draw.uniform(0.5, 3.0))

    # -- what is left ------------------------------------------------------------------------------

    def _ended(self, caller: HttpCaller, batch: HttpBatch) -> dict[str, Any] | None:
        """A batch once it has ended; None (and a violation) where it does not."""
        give_up_at = time.monotonic() + BATCH_SECONDS
        shown: dict[str, Any] = {}
        while time.monotonic() < give_up_at:
            found = caller.request("read", "GET", f"/v1/batches/{batch.id}")
            shown = found.json() if found is not None else shown
            if shown and shown["status"] not in _WAITING:
                return shown
            time.sleep(0.25)
        said = f"{batch.id} is {shown.get('status', 'not shown')} after {BATCH_SECONDS:.0f} s of peace"
        self._report.violate("http-batch", said)
        return None

    def _check(self, caller: HttpCaller, batch: HttpBatch, shown: dict[str, Any]) -> None:
        status, errors = shown["status"], (shown["errors"] or {"data": []})["data"]
        self._report.count(f"batches over HTTP {status}")
        if status == "failed" and any(error["code"] == "deleted" for error in errors):
            return  # pruned before its results were written, as this campaign asks for
        if status != "completed" and not (status == "cancelled" and batch.cancelled):
            self._report.violate(
                "http-batch", f"{batch.id} is {status}, and nobody asked for it: {errors}"[:400]
            )
            return
        results = self._lines(caller, batch, shown["output_file_id"])
        refused = self._lines(caller, batch, shown["error_file_id"])
        if results is None or refused is None:
            return
        names = [row["custom_id"] for row in results]
        if names != [name for name in batch.items if name in set(names)] or len(set(names)) != len(names):
            self._report.violate("http-rows", f"the results of {batch.id} are out of order, or doubled")
        everything = sorted([*names, *(row["custom_id"] for row in refused)])
        if everything != sorted(batch.items) and status == "completed":
            said = f"{batch.id} has {len(names)} results, {len(refused)} errors, of {len(batch.items)} rows"
            self._report.violate("http-rows", said)
        if refused and status == "completed":
            self._report.violate("innocent-failed", f"a row of {batch.id}: {refused[0]}"[:400])
        for row in results:
            text = row["response"]["body"]["choices"][0]["text"]
            caller.judge_text(
                f"{row['custom_id']} of {batch.id}", text, expected_of(batch.items[row["custom_id"]])
            )

    def _lines(
        self, caller: HttpCaller, batch: HttpBatch, file_id: str | None
    ) -> list[dict[str, Any]] | None:
        if file_id is None:
            return []
        for _ in range(20):  # a server may be starting
            found = caller.request("content", "GET", f"/v1/files/{file_id}/content")
            if found is not None:
                return [json.loads(line) for line in found.text.splitlines()]
            time.sleep(1.0)
        self._report.violate("http-batch", f"the results of {batch.id} cannot be read")
        return None
