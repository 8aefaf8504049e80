"""Jobs that were interrupted: by the death of their worker, or by its drain."""

import threading
from typing import Any

from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims
from tests.support.servers import wait_until
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import make_request
from tests.unit.worker.bench import PROMPT, Bench, Pausing, enqueue, stop

LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "stop": ("STOPSTOPSTOP",)}


def make_suspects(client: Client, count: int) -> list[str]:
    """Jobs that were in flight when their worker died."""
    ids = enqueue(client, count, max_tokens=3)
    dead = Claims(client.database, "d" * 32)
    dead.give_up([(one.job_id, one.attempt) for one in dead.claim(ids)], "it died")
    return ids


def undisturbed(seed: int) -> tuple[tuple[int, ...], str]:
    """Tokens and text of a long job that nothing interrupts."""
    return expected(make_request("j", PROMPT, seed=seed, **LONG), 200)[:2]


def drain_in_the_middle(bench: Bench, ids: list[str]) -> None:
    """Let the bench draw some tokens of each job, then have it stop."""
    assert isinstance(bench.runner, Pausing)
    thread = bench.run(ids)
    wait_until(lambda: len(bench.runner.batches) == bench.runner.pause_at)
    drained = threading.Thread(target=stop, args=(bench,))
    drained.start()
    wait_until(lambda: bench.service.draining)
    bench.runner.gate.set()
    drained.join(120)
    thread.join(120)
