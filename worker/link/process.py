"""The engine's own process: takes commands from a pipe, runs steps, sends completions back.

Python runs one thread of a process at a time, and a thread that wants its turn may wait for 5 ms. An engine
step takes about as long, and the GPU stands still if the next one is late: so claiming, tokenising and
SQL live in another process (`worker.link.link` is the pipe's other end).
"""

import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

from nightmill.jobs.base.logs import fit
from nightmill.jobs.errors import NightmillError
from nightmill.worker.assembly.engine import build_engine, import_gpu_runner, with_grammars
from nightmill.worker.assembly.model import open_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Completion, DrawnTokens
from nightmill.worker.link.garbage import QuietCollector
from nightmill.worker.link.messages import (
    Abandon,
    Answered,
    Ask,
    Begin,
    Cancel,
    Command,
    Completed,
    Deltas,
    Failed,
    Follow,
    Go,
    Loading,
    Ready,
    Stop,
    Submit,
)
from nightmill.worker.link.preparing import Preparing
from nightmill.worker.runners.gpu.device.device import DeviceLostError
from nightmill.worker.runners.starting import SelfTestError, StartStep
from nightmill.worker.watched import die_with_parent

log = logging.getLogger(__name__)

STATS_SECONDS = 0.5
PIECES_SECONDS = 0.01
"""Between two reports of what followed texts have grown by: less than two steps of most models."""
PREPARING_SECONDS = 0.005  # between two looks at grammars that are being compiled, if nothing else is to do


def serve(
    connection: Connection, build: Callable[[], Engine], collector: QuietCollector | None = None
) -> int:
    """Build an engine and run it until told to stop, or until nobody is at the other end.

    collector  says when to look for garbage: another one where the process is not the engine's alone

    Returns the exit code: 0 if it was told to stop.
    """
    try:
        engine = build()
    except (BrokenPipeError, ConnectionResetError):  # nobody is told of the progress any more
        log.warning("the worker has ended before its engine was built: this process ends, too")
        return 1
    except Exception as error:
        if not isinstance(error, NightmillError):
            log.critical("the engine could not be built", exc_info=True)
        return _fail(connection, error)
    try:
        with collector or QuietCollector() as quiet:
            connection.send(Ready(engine.stats, engine.arithmetic))
            _Loop(engine, connection, quiet).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.warning("the worker is gone: the engine ends, and other workers take over the jobs")
        return 1
    except Exception as error:
        log.critical("the engine failed: %s", error, exc_info=True)
        return _fail(connection, error)
    finally:
        engine.close()
    return 0


def _fail(connection: Connection, error: Exception) -> int:
    named = isinstance(error, NightmillError)
    by_products = isinstance(error, (SelfTestError, DeviceLostError))
    try:
        reason = str(error) if named else f"{type(error).__name__}: {error}"
        connection.send(Failed(reason, by_products))
    except OSError:
        log.warning("the worker is gone, too")
    return 1


class _Loop:
    """Runs an engine between the commands that arrive."""

    def __init__(self, engine: Engine, connection: Connection, collector: QuietCollector) -> None:
        self._engine = engine
        self._preparing = Preparing(engine)
        self._connection = connection
        self._collector = collector
        self._stopping = False
        self._reported = engine.stats
        self._report_at = 0.0
        self._pieces_at = 0.0

    def run(self) -> None:
        """Until Stop. Raises what the engine raises, EOFError if the other end is closed."""
        engine = self._engine
        while not self._stopping:
            self._take_commands()
            self._preparing.look()
            done = engine.step() if engine.has_work else []
            if engine.followed:
                self._tell_deltas()
            self._report(done)
            self._collector.look(idle=not engine.has_work)

    def _take_commands(self) -> None:
        """Carry out what was sent; sleep only if there is nothing to generate."""
        connection = self._connection
        while not self._stopping and connection.poll(self._patience()):
            self._carry_out(connection.recv())

    def _patience(self) -> float | None:
        """Seconds that a command may be waited for."""
        if self._engine.has_work:
            return 0.0
        return PREPARING_SECONDS if self._preparing else None

    def _carry_out(self, command: Command) -> None:
        match command:
            case Submit(requests):
                for request in requests:
                    self._preparing.submit(request)
            case Cancel(job_id):
                self._preparing.cancel(job_id)
            case Ask(number, job_ids, at_least):
                self._tell(number, self._engine.progress(job_ids, at_least))
            case Follow(job_ids):
                self._engine.follow(job_ids)
            case Abandon(number):
                partials = self._engine.abandon()
                computed = [
                    DrawnTokens(one.job_id, one.attempt, one.token_ids, one.gpu_seconds, one.energy_joules)
                    for one in partials
                ]
                self._tell(number, computed + self._preparing.abandon())
            case Stop():
                self._stopping = True
            case Begin() | Go():
                raise ValueError("the engine has begun already")

    def _tell(self, number: int, progress: list[DrawnTokens]) -> None:
        self._connection.send(Answered(number, progress, self._engine.stats))

    def _tell_deltas(self) -> None:
        now = time.monotonic()
        if now >= self._pieces_at and (deltas := self._engine.deltas()):
            self._connection.send(Deltas(deltas))
            self._pieces_at = now + PIECES_SECONDS

    def _report(self, done: list[Completion]) -> None:
        now = time.monotonic()
        idle = not self._engine.has_work
        if not done and not idle and now < self._report_at:
            return
        stats = self._engine.stats
        if done or stats != self._reported:
            self._connection.send(Completed(done, stats))
        self._reported, self._report_at = stats, now + STATS_SECONDS


def main() -> int:
    """Serve what the parent process says over the inherited socket that the last argument names.

    Ctrl-C and a supervisor's SIGTERM reach every process of a worker; when to stop is the worker's to say.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[-1])) as connection:
        die_with_parent()
        try:
            begin = connection.recv()
        except (EOFError, OSError):  # nothing is to be served after all
            return 0
        assert isinstance(begin, Begin)
        multiprocessing.current_process().name = "Engine"
        style = "[%(asctime)s: %(levelname)s/%(processName)s] %(message)s"
        logging.basicConfig(level=begin.log_level, format=style)
        fit(logging.getLogger().handlers, begin.settings.log_format, begin.settings.scrubbed)

        def build() -> Engine:
            progress = _Reporting(connection)
            progress(StartStep.OPENING)
            model = open_model(begin.settings, progress=progress)
            model = replace(model, plain_products=begin.plain_products, ledger=begin.ledger)
            if begin.waits:
                model = with_grammars(model)
                if not begin.settings.reference:
                    import_gpu_runner()
                _wait_for_go(connection)
            return build_engine(begin.settings, model)

        return serve(connection, build)


def _wait_for_go(connection: Connection) -> None:
    """Return when the GPU may be used; ends the process if it does not come to that."""
    try:
        go = connection.recv()
    except (EOFError, OSError):
        raise SystemExit(0) from None
    assert isinstance(go, Go)


class _Reporting:
    """Sends how far the engine is built; called from any thread, as kernels are compiled on several."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def __call__(self, step: StartStep, news: str = "") -> None:
        with self._sending:
            self._connection.send(Loading(step, news))


if __name__ == "__main__":
    sys.exit(main())
