"""Several workers under one supervisor: one log, one page of metrics, one end.

There is one for each GPU of a machine, or, on one GPU, one for each of several models. Each worker is a
process of its own; all share the queues, as workers on several machines do. One that fails is started again,
after a second, then twice as long each time. Workers end with their supervisor, whatever becomes of it: their
standard input is a pipe that closes then.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, BinaryIO

from nightmill.jobs.base.silence import Silence
from nightmill.worker.assembly.options import TURN
from nightmill.worker.service.parent import END_WITH_STDIN

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger("nightmill.supervisor")


class Each(StrEnum):
    """The thing that each worker has for itself: label of its metrics, key of its lines in a log of JSON."""

    GPU = "gpu"
    MODEL = "model"


_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # before a worker that failed is started again
_STEADY_SECONDS = 60.0  # after which a worker's end does not count as one more in a row
_MOST_FAILURES = 8  # in a row: some four minutes
_LOOK_SECONDS = 0.1
_KILL_SECONDS = 5.0
_LAST_LINES_SECONDS = 5.0


class _Supervised:
    """One worker: its process, and how often it failed in a row."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        write: Callable[[str, bytes], None],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._pass_fds = tuple(pass_fds)
        self._command = [*command, END_WITH_STDIN]
        self._write = write
        self._failures = 0
        self._start_at = self._started_at = 0.0
        self._reader: threading.Thread | None = None
        self.popen: subprocess.Popen[bytes] | None = None
        self.over: int | None = None
        """Its exit code, once it is not started again."""

    def look(self, now: float, *, ending: bool) -> None:
        """Start it if it is time to; see whether it has ended."""
        if self.over is not None:
            return
        if self.popen is None:
            if ending:
                self.over = 0
            elif now >= self._start_at:
                self._start(now)
            return
        code = self.popen.poll()
        if code is None:
            return
        self._finish()
        if ending or code == 0:  # somebody told it to end
            self.over = code
            return
        self._failures = 1 if now - self._started_at >= _STEADY_SECONDS else self._failures + 1
        if self._failures >= _MOST_FAILURES:
            log.critical("worker %s failed %d times in a row: it stays away", self.name, self._failures)
            self.over = code
            return
        pause = min(_FIRST_PAUSE * 2 ** (self._failures - 1), _LONGEST_PAUSE)
        log.error("worker %s ended with code %d; it starts again in %.0f s", self.name, code, pause)
        self._start_at = now + pause

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    def _start(self, now: float) -> None:
        self._started_at = now
        self.popen = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the supervisor to pass on
            pass_fds=self._pass_fds,
        )
        assert self.popen.stdout is not None
        lines = iter(self.popen.stdout.readline, b"")
        self._reader = threading.Thread(target=self._copy, args=(lines,), name=self.name, daemon=True)
        self._reader.start()

    def _copy(self, lines: Iterator[bytes]) -> None:
        with suppress(ValueError, OSError):  # the pipe is closed
            for line in lines:
                self._write(self.name, line)

    def _finish(self) -> None:
        popen, self.popen = self.popen, None
        if self._reader is not None:
            self._reader.join(_LAST_LINES_SECONDS)  # of what it wrote last
        for pipe in (popen.stdin, popen.stdout) if popen is not None else ():
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class Supervisor:
    """Runs workers until it is told to end, or none is left.

    commands     of the workers, by what each is called: the index of its GPU, or its model
    end_seconds  how long they may take to end, before they are killed
    each         what they are called by
    as_json      whether their log is lines of JSON
    pass_fds     descriptors that they inherit
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        end_seconds: float,
        *,
        each: Each = Each.GPU,
        as_json: bool = False,
        output: BinaryIO | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._each = each
        self._as_json = as_json
        self._output = output or sys.stderr.buffer
        self._writing = threading.Lock()
        self._workers = [
            _Supervised(name, command, self._write, pass_fds) for name, command in commands.items()
        ]
        self._end_seconds = end_seconds
        self._told: list[signal.Signals] = []

    def tell(self, number: int, _frame: object = None) -> None:
        """Take a signal: the workers drain, and at the second one, or SIGQUIT, hand back at once."""
        again = signal.SIGQUIT if self._told or number == signal.SIGQUIT else signal.SIGTERM
        self._told.append(again)

    def run(self) -> int:
        """Return the exit code: 0 if all ended in order, else that of one that did not."""
        passed_on = 0
        silence: Silence | None = None
        while True:
            ending = bool(self._told)
            for number in self._told[passed_on:]:
                passed_on += 1
                silence = silence or Silence(self._end_seconds, 2 * _LOOK_SECONDS)
                for worker in self._workers:
                    worker.signal(number)
            now = time.monotonic()
            for worker in self._workers:
                worker.look(now, ending=ending)
            codes = [worker.over for worker in self._workers if worker.over is not None]
            if len(codes) == len(self._workers):
                return next((code for code in codes if code != 0), 0)
            if silence is not None and silence.too_long():
                for worker in self._workers:
                    worker.signal(signal.SIGKILL)
                silence = Silence(_KILL_SECONDS, 2 * _LOOK_SECONDS)
            time.sleep(_LOOK_SECONDS)

    def _write(self, name: str, line: bytes) -> None:
        """Write a line of a worker's log, with the worker that wrote it."""
        mark = f"GPU {name}" if self._each is Each.GPU else name
        named = f"[{mark}] ".encode() + line
        if self._as_json:
            with suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict):
                    named = json.dumps({str(self._each): name} | values, ensure_ascii=False).encode() + b"\n"
        with self._writing:
            self._output.write(named if named.endswith(b"\n") else named + b"\n")
            self._output.flush()


class MergedMetrics:
    """The metrics of several workers as one page's, each with a label that says whose they are.

    read  returns the pages of those that answer, by name
    """

    def __init__(self, read: Callable[[], Mapping[str, str]], each: Each = Each.GPU) -> None:
        self._read = read
        self._label = str(each)

    def describe(self) -> "Iterable[Metric]":
        """Return nothing: what there is, is known when it is asked for."""
        return ()

    def collect(self) -> "Iterator[Metric]":
        """Every metric of all workers, as of now."""
        from prometheus_client.core import Metric
        from prometheus_client.parser import text_string_to_metric_families

        merged: dict[str, Any] = {}
        for name, page in self._read().items():
            for family in text_string_to_metric_families(page):
                into = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    labels = {self._label: name} | sample.labels | {self._label: name}
                    into.samples.append(sample._replace(labels=labels))
        yield from merged.values()


def read_pages(ports: Mapping[str, int], seconds: float = 2.0) -> dict[str, str]:
    """Return the metrics of the workers that listen at these ports of this machine; those that answer."""
    from urllib.request import urlopen

    pages: dict[str, str] = {}
    for name, port in ports.items():
        with (
            suppress(OSError, UnicodeDecodeError),
            urlopen(f"http://127.0.0.1:{port}/metrics", timeout=seconds) as answer,
        ):
            pages[name] = answer.read().decode()
    return pages


def commands_of(command: Sequence[str], gpus: Sequence[int], port: int | None) -> dict[str, list[str]]:
    """Return the command of each GPU's worker; `port`: of the supervisor's metrics, which theirs follow."""
    return {
        str(gpu): _with_options(command, {"--gpu": str(gpu)} | _metrics(port, place))
        for place, gpu in enumerate(gpus, start=1)
    }


def commands_of_models(
    command: Sequence[str],
    models: Mapping[str, str],
    shares: Mapping[str, int],
    group: Mapping[str, str],
    port: int | None,
) -> dict[str, list[str]]:
    """Return the command of each model's worker.

    models  their files by name
    shares  bytes of the GPU's memory, where there is one
    group   options that all have
    port    of the supervisor's metrics, which theirs follow
    """
    made: dict[str, list[str]] = {}
    for place, (name, file) in enumerate(models.items(), start=1):
        options = {"--models": f"{name}={file}", TURN: name} | dict(group) | _metrics(port, place)
        if name in shares:
            options["--gpu-memory"] = str(shares[name])
        made[name] = _with_options(command, options)
    return made


def _metrics(port: int | None, place: int) -> dict[str, str]:
    if port is None:
        return {}
    return {"--metrics-port": str(port + place), "--metrics-host": "127.0.0.1"}


def _with_options(command: Sequence[str], options: Mapping[str, str]) -> list[str]:
    from nightmill.worker.service.sleeping import with_option

    made = list(command)
    for name, value in options.items():
        made = with_option(made, name, value)
    return made


def supervise(
    commands: Mapping[str, Sequence[str]],
    end_seconds: float,
    *,
    each: Each = Each.GPU,
    as_json: bool,
    address: tuple[str, int] | None,
    pass_fds: Sequence[int] = (),
) -> int:
    """Run these workers until a signal ends them; returns the exit code.

    each      what they are called by
    address   host and port of the page of metrics; None: there is none
    pass_fds  descriptors that they inherit
    """
    if address is not None:
        from nightmill.worker.service.metrics import serve_metrics

        host, port = address
        ports = {name: port + place for place, name in enumerate(commands, start=1)}
        serve_metrics(host, port).register(MergedMetrics(lambda: read_pages(ports), each))
    supervisor = Supervisor(commands, end_seconds, each=each, as_json=as_json, pass_fds=pass_fds)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, supervisor.tell)
    kind = "GPU" if each is Each.GPU else "model"
    log.info("process %d supervises a worker for each %s of %s", os.getpid(), kind, ", ".join(commands))
    return supervisor.run()
