"""A thread that plays the worker, and what tests of verifying look at."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import select, update

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.batch_reading import BATCHES
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.jobs import JOBS
from nightmill.jobs.sql.tables import JobRow

H100 = Arithmetic(runner="cuda", device="NVIDIA H100", weights="f16", kv="f16", kernels="1", model="2")
H200 = Arithmetic(runner="cuda", device="NVIDIA H200", weights="f16", kv="f16", kernels="1", model="2")
Answer = Callable[[Any], Outcome]


def outcome(claim: Any, text: str | None = None, name: Arithmetic | None = H200, **changes: Any) -> Outcome:
    """What a worker writes: a text that depends on prompt and seed alone."""
    words = text if text is not None else f"the text of {claim.prompt} with seed {claim.seed}"
    values: dict[str, Any] = {"stop_reason": StopReason.EOS, "arithmetic": name and str(name)} | changes
    return Outcome(claim.job_id, claim.attempt, values.pop("stop_reason"), words, 3, 5, **values)


def run_all(client: Client, claims: Claims, answer: Answer = outcome) -> None:
    """Claim and end what is queued."""
    for claim in claims.claim([job.id for job in client.list_jobs(state="queued", limit=1000)]):
        claims.finish([answer(claim)])


@contextmanager
def working(client: Client, claims: Claims, answer: Answer = outcome) -> Iterator[None]:
    """A worker at work, in a thread."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.02):
            run_all(client, claims, answer)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def everything(client: Client) -> tuple[Any, ...]:
    """Both tables, whole."""
    with client.database.read() as connection:
        return (
            connection.execute(select(JOBS).order_by(JobRow.id)).all(),
            connection.execute(select(BATCHES).order_by(BATCHES.c.name)).all(),
        )


def tamper(client: Client, number: int, **values: Any) -> str:
    """Change a row behind everybody's back; returns its id."""
    with client.database.write() as connection:
        changing = update(JOBS).where(JobRow.row == number, JobRow.batch == "night")
        return str(connection.execute(changing.values(**values).returning(JobRow.id)).scalar_one())
