"""From process start to "ready", with an empty kernel cache and with a warm one.

    python -m benchmarks.startup MODEL.gguf [--max-sequences 256]

Prints one JSON line; the model file should be in the page cache. Starts its own Redis; SQLite.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from nightmill.jobs.client import Client
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.process import running_worker
from tests.servers import start_redis


def main() -> None:
    """Start a worker twice."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--max-sequences", type=int, default=256)
    options = arguments.parse_args()
    options.model.read_bytes()  # into the page cache
    with TemporaryDirectory(prefix="nightmill-bench-") as name, start_redis(Path(name) / "redis") as redis:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"  # the worker inherits it
        settings = Settings(data_dir=Path(name), broker_url=redis.url, model=options.model)
        with Client(settings) as client:
            seconds = [start(client, Path(name) / "worker.log", options.max_sequences) for _ in range(2)]
    report = {"cold_cache_seconds": round(seconds[0], 1), "warm_cache_seconds": round(seconds[1], 1)}
    print(json.dumps({"model": options.model.name, "max_sequences": options.max_sequences} | report))


def start(client: Client, log: Path, max_sequences: int) -> float:
    """Seconds until the worker's row says that it is ready."""
    client.database.ensure_schema()
    began = time.perf_counter()
    with running_worker(client, log, ["--max-sequences", str(max_sequences)]):
        seconds = time.perf_counter() - began
    print(log.read_text(), file=sys.stderr)  # where the time goes
    return seconds


if __name__ == "__main__":
    main()
