"""The ordinary life of a queue, beside the faults: jobs come in, people look and change their minds."""

import random
import threading
from datetime import timedelta

from nightmill.jobs.errors import InvalidRequestError, InvalidTransitionError, JobNotFoundError
from tests.campaign.caller import Caller
from tests.campaign.ledger import Ledger
from tests.campaign.limits import client_limit
from tests.campaign.report import Report
from tests.campaign.world import OTHER_MODEL, World

MOST_UNFINISHED = 250
LONGEST_LOOP = 180.0  # of several calls, each of which may meet the end of a hang


class Traffic:
    """Threads that go on until `stop`."""

    def __init__(self, world: World, ledger: Ledger, report: Report, seed: int) -> None:
        self._world = world
        self._ledger = ledger
        self._report = report
        self._closing = threading.Event()
        loops = (self._hand_over, self._look)
        self._callers = [
            Caller(world, ledger, report, random.Random(f"{seed} {loop.__name__}")) for loop in loops
        ]
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop, caller), daemon=True)
            for loop, caller in zip(loops, self._callers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Hand over nothing more."""
        self._closing.set()
        for thread in self._threads:
            thread.join(LONGEST_LOOP)
            if thread.is_alive():
                said = f"calls of the client have not returned for {LONGEST_LOOP:.0f} s"
                self._report.violate("call-hangs", said)
        for caller in self._callers:
            caller.close()

    def _guarded(self, loop, caller: Caller) -> None:  # type: ignore[no-untyped-def]
        while not self._closing.is_set():
            with caller.judging(loop.__name__):
                loop(caller)

    def _hand_over(self, caller: Caller) -> None:
        draw = caller.draw
        with self._ledger.timing("stats", client_limit("stats")):
            states = caller.client.stats()["state"]
        unfinished = sum(number for state, number in states.items() if state in ("queued", "running"))
        if unfinished > MOST_UNFINISHED:
            self._closing.wait(0.3)
            return
        items = [caller.request() for _ in range(draw.choice((1, 1, 5, 24, 40)))]
        more = {}
        if draw.random() < 0.15:
            more["deadline"] = timedelta(seconds=draw.choice((0.5, 3.0, 20.0)))
        if draw.random() < 0.1:
            more["scheduled_at"] = timedelta(seconds=draw.uniform(0.1, 2.0))
            more.pop("deadline", None)
        if draw.random() < 0.3:
            more["batch"] = f"open-{draw.randrange(4)}"
        if (which := draw.random()) < 0.4:
            more["model"] = "bytes" if which < 0.3 else OTHER_MODEL
        caller.enqueue(items, **more)
        self._closing.wait(draw.uniform(0.02, 0.3))

    def _look(self, caller: Caller) -> None:
        """Every way of reading must answer, whatever is in the rows."""
        draw, client = caller.draw, caller.client
        with caller.calling("list_jobs"):
            client.list_jobs(limit=500)
        with caller.calling("workers"):
            client.workers()
        with self._ledger.timing("list_batches", client_limit("list_batches")):
            batches = client.list_batches(limit=5)
        for batch in batches:
            with caller.calling("status", LookupError):
                batch.status()
        known = list(self._ledger.promises)
        if known:
            with caller.calling("get", JobNotFoundError):
                client.get(draw.choice(known))
            if draw.random() < 0.2:
                self._cancel(caller, draw.choice(known))
        self._closing.wait(0.5)

    def _cancel(self, caller: Caller, job_id: str) -> None:
        expected = (InvalidTransitionError, JobNotFoundError, InvalidRequestError)
        with caller.calling("cancel", *expected), self._ledger.intending("cancel", job_id):
            caller.client.cancel(job_id)
