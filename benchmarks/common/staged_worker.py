"""A worker that computes nothing and says where its processor time goes: by stage, and by thread.

For `short_rows.py`. Each stage counts the processor time of the thread that is in it, without what waits and
without the stages inside it. The file that STAGE_TIMES names has the sums since the start, as JSON, renewed a
few times a second.
"""

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nightmill.jobs.messages.broker import Broker
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.flows import Flows
from nightmill.jobs.sql.sweep import Sweep
from nightmill.worker.commands.serving import worker
from nightmill.worker.link.link import EngineLink
from nightmill.worker.service.activity import Activity
from nightmill.worker.service.housekeeper import Housekeeper
from nightmill.worker.service.message_filter import MessageFilter
from nightmill.worker.service.publishing import Publisher
from nightmill.worker.service.requesting import Requesting
from nightmill.worker.service.reusing import Reusing
from nightmill.worker.service.shards import Service
from nightmill.worker.service.writer import ResultWriter
from tests.support.instant_worker import SEQUENCES, build_engine
from tests.support.own_engine import run_module

NAME = "benchmarks.common.staged_worker"
COMMAND = (sys.executable, "-m", NAME)
TIMES = "STAGE_TIMES"
_EVERY = 0.2  # seconds

_STAGES: tuple[tuple[type, str, str], ...] = (
    (Service, "run_shard", "shards"),
    (Service, "_claim", "claims"),
    (Claims, "claim_within", "claims"),
    (Service, "begin", "shards"),
    (Requesting, "prompts", "tokenizer"),
    (Requesting, "requests", "requests"),
    (Reusing, "to_compute", "requests"),
    (EngineLink, "submit", "pipe to the engine"),
    (EngineLink, "_take", "answers"),
    (Service, "_on_completion", "answers"),
    (ResultWriter, "_write_all", "writer"),
    (Service, "_forget", "writer"),
    (Flows, "top_up", "shares: looks and marks"),
    (Broker, "announce", "shares: messages"),
    (Sweep, "expire", "sweeps"),
    (Sweep, "unanswered", "sweeps"),
    (Sweep, "rescue", "sweeps"),
    (Housekeeper, "beat", "sweeps"),
    (Service, "poll_cancellations", "cancellations"),
    (Service, "save_partials", "saving"),
    (Activity, "look", "activity"),
    (Publisher, "_look", "publisher"),
    (MessageFilter, "admit", "messages"),
)


class StageTimes:
    """Sums of processor seconds by stage; methods are replaced by ones that count."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._inside = threading.local()

    def count(self, owner: type, name: str, stage: str) -> None:
        """Count what this method takes to this stage."""
        call: Callable[..., Any] = getattr(owner, name)
        inside, seconds, lock, clock = self._inside, self._seconds, self._lock, time.thread_time

        def counted(*arguments: Any, **named: Any) -> Any:
            outer = getattr(inside, "taken", 0.0)
            inside.taken = 0.0
            began = clock()
            try:
                return call(*arguments, **named)
            finally:
                whole = clock() - began
                with lock:
                    seconds[stage] += whole - inside.taken
                inside.taken = outer + whole

        setattr(owner, name, counted)

    def tell(self) -> None:
        """Write the sums again and again."""
        while True:
            time.sleep(_EVERY)
            with self._lock:
                stages = dict(self._seconds)
            names = {thread.native_id: thread.name.rstrip("0123456789-_") for thread in threading.enumerate()}
            threads: dict[str, float] = defaultdict(float)
            for task in Path("/proc/self/task").iterdir():
                try:
                    spent = int((task / "schedstat").read_text().split()[0]) / 1e9
                except OSError:  # it has ended
                    continue
                threads[names.get(int(task.name), "of libraries")] += spent
            told = {"stages": stages, "threads": threads, "process": time.process_time()}
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(told))
            part.replace(self._file)


def main() -> None:
    """Be the worker, or the process of its engine."""
    if sys.argv[1:2] != ["engine"] and TIMES in os.environ:
        times = StageTimes(Path(os.environ[TIMES]))
        for stage in _STAGES:
            times.count(*stage)
        threading.Thread(target=times.tell, name="stage times", daemon=True).start()
    options = ["--max-sequences", str(SEQUENCES), *sys.argv[1:]]
    run_module(NAME, build_engine, lambda: worker.main(options))


if __name__ == "__main__":
    main()
