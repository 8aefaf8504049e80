"""The process of a part: `python -m nightmill.worker.commands.benchmarking.process SOCKET`."""

import logging
import os
import sys
import threading
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection

from nightmill.jobs.errors import NightmillError
from nightmill.worker.assembly.model import open_model
from nightmill.worker.assembly.sizes import hang_seconds
from nightmill.worker.commands.benchmarking.kernels import compile_all_kernels
from nightmill.worker.commands.benchmarking.parts import News, Part, PartTask
from nightmill.worker.commands.benchmarking.report import PartReport
from nightmill.worker.commands.benchmarking.texts import Timing, benchmark_format, numpy_tokens
from nightmill.worker.runners.starting import StartStep
from nightmill.worker.watched import describe, die_with_parent

__all__ = ["main"]

_NEWS_SECONDS = 1.0  # between two pieces of the same news
_COMPILING_SECONDS = 600.0  # without a kernel that is done
_BESIDE = 10  # of the operating system's niceness: NumPy computes while kernels are compiled


def main() -> None:
    """Compute what the parent asks for, and send it news and reports; the last message is None."""
    logging.basicConfig(level=logging.WARNING)
    with Connection(int(sys.argv[-1])) as connection:
        die_with_parent()
        task: PartTask = connection.recv()
        with suppress(BrokenPipeError):  # nobody waits any more
            teller = _Teller(connection, task)
            try:
                report = _computed(task, teller)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                report = PartReport(task.name)
                reason = str(error) if isinstance(error, NightmillError) else describe(error)
                report.failed("runs to the end", reason)
            connection.send(report)
            connection.send(None)


def _computed(task: PartTask, teller: "_Teller") -> PartReport:
    settings = task.settings
    model = open_model(settings)
    with closing(model.file):
        match task.part:
            case Part.KERNELS:
                return compile_all_kernels(settings, model, task.weights, said=teller.counted)
            case Part.NUMPY:
                os.nice(_BESIDE)
                return numpy_tokens(settings, model, task.weights, said=teller.said)
            case Part.FORMAT:
                timing = Timing(task.loads, task.seconds, task.altogether)
                return benchmark_format(settings, model, timing, said=teller.said, found=teller.found)


class _Teller:
    """Sends news, also from threads, but the same not too often."""

    def __init__(self, connection: Connection, task: PartTask) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._patience = hang_seconds(task.settings)
        self._starting = {step.words: step.seconds for step in StartStep}
        self._words, self._next = "", 0.0

    def counted(self, words: str, done: int, total: int) -> None:
        """So much of it is done."""
        self._send(News(words, done, total, _COMPILING_SECONDS))

    def said(self, words: str) -> None:
        """This goes on."""
        now = time.monotonic()
        if words == self._words and now < self._next:
            return
        self._words, self._next = words, now + _NEWS_SECONDS
        patience = self._starting.get(words.partition(":")[0], self._patience)
        self._send(News(words, patience=patience))

    def found(self, report: PartReport) -> None:
        """There is more of the report."""
        self._send(report)

    def _send(self, message: News | PartReport) -> None:
        with self._sending:
            self._connection.send(message)


if __name__ == "__main__":
    main()
