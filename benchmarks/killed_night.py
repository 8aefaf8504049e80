"""A night of mixed rows whose worker is killed amid them, against the same night undisturbed: token by token.

    python -m benchmarks.killed_night MODEL.gguf [--rows 600] [--max-sequences 256] [--next 96] [--kills 1]

Prompts of 8 to 160 words, half of which begin like others, and answers of 16 to 256 tokens go through SQLite,
Redis and a worker, twice. In the second night the worker gets SIGKILL once a share of the rows has ended, as
often as is asked, at least once; each next one computes another number of sequences at once. `--beside`: the
undisturbed night goes on another GPU of the same kind, at the same time. Prints a JSON line, with how many
rows differ (which has to be 0), and how many tokens went on from saved ones; fails if any row differs.
"""

import argparse
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.servers import durable_client
from nightmill.jobs.client.client import Client
from nightmill.worker.commands.process import running_worker
from tools.demo_model.corpus import topics, words

_QUICK = {"heartbeat_seconds": 0.5, "stale_seconds": 3.0, "resend_seconds": 3.0, "save_seconds": 1.0}


@dataclass(frozen=True, slots=True)
class Night:
    """What a night brought: the tokens of each row, and seconds; of one that was killed, what went on."""

    tokens: list[tuple[int, ...]]
    seconds: float
    ended_before: int = 0
    resumed: int | None = None


def main() -> None:
    """Run both nights and compare them."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--rows", type=int, default=600)
    arguments.add_argument("--max-sequences", type=int, default=256)
    arguments.add_argument("--next", type=int, default=96, help="sequences at once of the next workers")
    arguments.add_argument("--kills", type=int, default=1)
    arguments.add_argument("--weights", default="auto")
    arguments.add_argument("--gpu", type=int, default=0)
    arguments.add_argument("--beside", type=int, metavar="GPU", help="of the undisturbed night")
    options = arguments.parse_args()
    if options.kills < 1:
        arguments.error("--kills: a night without a kill is compared with nothing")
    if options.beside == options.gpu:
        arguments.error("--beside: name another GPU than --gpu; without it, the nights follow each other")
    rows = list(night(options.rows))
    with ThreadPoolExecutor(1) as aside:
        plain = aside.submit(undisturbed, rows, options)
        if options.beside is None:
            plain.result()
        killed = interrupted(rows, options)
        expected = plain.result()
    differ = sum(one != other for one, other in zip(expected.tokens, killed.tokens, strict=True))
    report = {
        "rows": len(rows),
        "tokens": sum(map(len, expected.tokens)),
        "differ": differ,
        "ended_before_the_last_worker": killed.ended_before,
        "resumed_tokens": killed.resumed,
        "seconds_undisturbed": round(expected.seconds, 1),
        "seconds_killed": round(killed.seconds, 1),
        "at_the_same_time": options.beside is not None,
    }
    print(json.dumps(report))
    if differ:
        raise SystemExit(f"{differ} of {len(rows):,} rows differ")


def undisturbed(rows: list[dict[str, Any]], options: argparse.Namespace) -> Night:
    """Run the night that nothing interrupts."""
    gpu = options.gpu if options.beside is None else options.beside
    settings = _QUICK | {"model": options.model, "gpu": gpu, "weights": options.weights}
    with durable_client(sqlite=True, **settings) as (client, home):
        began = time.perf_counter()
        with running_worker(client, home / "plain.log", ["--max-sequences", str(options.max_sequences)]):
            tokens = finished(client, enqueue(client, rows, "plain"))
        seconds = time.perf_counter() - began
        say((home / "plain.log").read_text())
    say(f"undisturbed: {len(rows):,} rows, {sum(map(len, tokens)):,} tokens, {seconds:.1f} s")
    return Night(tokens, seconds)


def interrupted(rows: list[dict[str, Any]], options: argparse.Namespace) -> Night:
    """Run the night whose workers are killed."""
    settings = _QUICK | {"model": options.model, "gpu": options.gpu, "weights": options.weights}
    with durable_client(sqlite=True, **settings) as (client, home):
        began = time.perf_counter()
        ids = enqueue(client, rows, "killed")
        for kill in range(options.kills):
            sequences = options.next if kill else options.max_sequences
            log = home / f"killed-{kill}.log"
            with running_worker(client, log, ["--max-sequences", str(sequences)]) as process:
                while ended(client, "killed") < (kill + 1) * len(rows) // (options.kills + 1):
                    time.sleep(0.1)
                process.send_signal(signal.SIGKILL)
                process.wait()
            before = ended(client, "killed")
            say(f"killed after {before:,} rows, {time.perf_counter() - began:.1f} s")
        with running_worker(client, home / "last.log", ["--max-sequences", str(options.next)]):
            tokens = finished(client, ids)
        seconds = time.perf_counter() - began
        said = (home / "last.log").read_text()
        say(said)
        counted = re.search(r"stopped; (\d+) tokens drawn, (\d+) resumed", said)
    return Night(tokens, seconds, before, None if counted is None else int(counted[2]))


def say(news: str) -> None:
    """Tell a person who waits."""
    print(news, file=sys.stderr, flush=True)


def night(count: int) -> Iterator[dict[str, Any]]:
    """Items for enqueue_many."""
    draw = random.Random(1)
    vocabulary = [*topics(), *words()]
    beginning = " ".join(draw.choices(vocabulary, k=80))
    for number in range(count):
        own = " ".join(draw.choices(vocabulary, k=draw.randint(8, 160)))
        begins = beginning[: draw.choice((0, 0, 150, 400))]
        yield {"prompt": f"{begins} {own}.", "max_tokens": draw.randint(16, 256), "seed": number}


def enqueue(client: Client, rows: list[dict[str, Any]], batch: str) -> list[str]:
    """Queue the rows, whose tokens are to be returned."""
    asked: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True, "return_token_ids": True}
    return list(client.enqueue_many(rows, batch=batch, **asked))


def ended(client: Client, batch: str) -> int:
    """Rows of a batch that have succeeded."""
    states = client.stats(batch)["state"]
    assert isinstance(states, dict)
    return int(states.get("succeeded", 0))


def finished(client: Client, ids: list[str]) -> list[tuple[int, ...]]:
    """The tokens of all answers, once there are all."""
    client.wait(ids)
    found = {job.id: job.answers[0].token_ids for job in client.results(ids) if job.answers}
    return [found[one] or () for one in ids]


if __name__ == "__main__":
    main()
