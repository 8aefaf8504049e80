"""What the parts of a short row cost the worker, on one thread: for machines that others use, too.

    python -m benchmarks.row_parts [--shards 60] [--sqlite] [--texts]

Rows go through the worker's own parts, shard by shard, on the thread that measures: no engine, no messages,
and no other thread wants the interpreter. Prints microseconds of processor time a row, the least and the
first quartile of all shards: others on the machine make a shard slower, never faster. A whole worker is
measured by `short_rows`.
"""

import argparse
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TypeVar

from sqlalchemy import select

from benchmarks.common.servers import durable_client
from benchmarks.short_rows import prompts
from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.tables import JobRow
from nightmill.worker.assembly.model import demo_model, load_model
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.link.messages import Completed, Submit
from nightmill.worker.service.answering import Answering
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.requesting import Requesting
from tests.support.instant_worker import InstantRunner

Made = TypeVar("Made")

_SHARD, _GROUP = 64, 256  # rows that are claimed, and written, together
_BATCHES = 6  # as which the rows are enqueued


class Times:
    """Microseconds of processor time a row, of each part, for each call."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = defaultdict(list)

    def of(self, part: str, rows: int, call: Callable[[], Made]) -> Made:
        """Call, and note how long this took the thread."""
        began = time.thread_time()
        made = call()
        self._found[part].append(1e6 * (time.thread_time() - began) / rows)
        return made

    def tell(self) -> None:
        """Print a line for each part."""
        for part, found in self._found.items():
            first_quartile = statistics.quantiles(found, n=4)[0]
            print(f"{part:32} {min(found):6.1f} {first_quartile:6.1f}")


def main() -> None:
    """Enqueue rows, and take them through the parts."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--shards", type=int, default=60)
    arguments.add_argument("--sqlite", action="store_true", help="SQLite in place of PostgreSQL")
    arguments.add_argument("--texts", action="store_true", help="texts in place of chats")
    options = arguments.parse_args()
    times = Times()
    with durable_client(sqlite=options.sqlite, model=demo_model()) as (client, _):
        rows = -(-options.shards * _SHARD // _BATCHES)
        for number in range(_BATCHES):
            asked = list(prompts(rows, texts=options.texts))
            times.of(
                "enqueue_many",
                rows,
                lambda: client.enqueue_many(asked, batch=f"parts-{number}", max_tokens=8),  # noqa: B023
            )
        work(client, times)
    times.tell()


def work(client: Client, times: Times) -> None:
    """Claim and finish all rows, each with one token."""
    with client.database.read() as connection:
        ids = list(connection.execute(select(JobRow.id).order_by(JobRow.id)).scalars())
    model, claims = load_model(client.settings), Claims(client.database, "row-parts")
    in_flight = InFlight(len(ids))
    answering = Answering(in_flight, model.spell_token)
    requesting = Requesting(
        in_flight, answering, model, arithmetic=lambda: InstantRunner.arithmetic, now=client.database.now
    )
    outcomes: list[Outcome] = []
    for first in range(0, len(ids), _SHARD):
        shard = ids[first : first + _SHARD]
        size = len(shard)
        slots = in_flight.reserve(size)
        claimed, _ = times.of(
            "claim", size, lambda: claims.claim_within(shard, slots, in_flight.most)  # noqa: B023
        )  # fmt: skip
        in_flight.fill(slots, claimed)
        ids_of = times.of("tokenize, in Python", size, lambda: requesting.prompts(claimed))  # noqa: B023
        requests: list[Request] = times.of(
            "requests",
            size,
            lambda: [one for pair in zip(claimed, ids_of, strict=True) for one in requesting.requests(*pair)],  # type: ignore[arg-type]  # noqa: B023
        )
        sent = times.of("write requests to the pipe", size, lambda: ForkingPickler.dumps(Submit(requests)))  # noqa: B023
        taken = times.of("  engine: read them", size, lambda: pickle.loads(sent))  # noqa: B023
        ended = Completed([completed(one) for one in taken.requests], None)  # type: ignore[arg-type]
        told = times.of("  engine: write completions", size, lambda: ForkingPickler.dumps(ended))  # noqa: B023
        read = times.of("read completions from the pipe", size, lambda: pickle.loads(told))  # noqa: B023
        outcomes += times.of("outcomes", size, lambda: outcomes_of(answering, read.completions))  # noqa: B023
        if len(outcomes) >= _GROUP or first + size == len(ids):
            times.of("write results", len(outcomes), lambda: claims.finish(outcomes))  # noqa: B023
            in_flight.remove([(one.job_id, one.attempt) for one in outcomes])
            outcomes = []
    model.close()


def completed(request: Request) -> Completion:
    """The answer of one token to a request."""
    return Completion(
        request.job_id,
        request.attempt,
        (65,),
        "b",
        StopReason.EOS,
        len(request.prompt_ids),
        1,
        gpu_seconds=1e-4,
    )


def outcomes_of(answering: Answering, completions: Sequence[Completion]) -> list[Outcome]:
    """The outcomes of jobs with one answer."""
    name = str(InstantRunner.arithmetic)
    found = [answering.completed(completion, name) for completion in completions]
    return [outcome for outcome in found if outcome is not None]


if __name__ == "__main__":
    main()
