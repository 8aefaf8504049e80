"""A program that enqueues, forks, and has its children enqueue: prints each request that was acknowledged."""

import json
import os
import random
import sys
from typing import Any

from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import NightmillError

CHILDREN, JOBS = 4, 6


def main() -> None:
    """As gunicorn with preload, or a Celery prefork worker, does."""
    seed = int(sys.argv[1])
    client = Client()
    enqueue(client, random.Random(seed), 2)
    children = []
    for number in range(CHILDREN):
        child = os.fork()
        if child == 0:
            try:
                enqueue(client, random.Random(seed + number + 1), JOBS)
            except Exception as error:
                say({"broken": f"{type(error).__name__}: {error}"})
            os._exit(0)
        children.append(child)
    enqueue(client, random.Random(seed - 1), JOBS)  # the parent goes on beside them
    for child in children:
        os.waitpid(child, 0)
    client.close()


def enqueue(client: Client, draw: random.Random, count: int) -> None:
    """One at a time, as a web server would; the first refusal is the last, since each may take its time."""
    for _ in range(count):
        item = {"prompt": f"fork {draw.randrange(1 << 30)}", "seed": draw.randrange(1 << 40), "max_tokens": 9}
        try:
            job_id = client.enqueue(**item)
        except NightmillError as error:
            say({"refused": f"{type(error).__name__}: {error}"})
            return
        else:
            say({"id": job_id, "item": item})


def say(entry: dict[str, Any]) -> None:
    """One write of one line: lines of several processes do not mix."""
    os.write(1, (json.dumps(entry) + "\n").encode())


if __name__ == "__main__":
    main()
