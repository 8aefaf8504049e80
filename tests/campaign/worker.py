"""A real worker (and a real `run` and `serve`) around a runner that costs nothing and whose texts are known.

    python -m tests.campaign.worker worker|run|serve ARGUMENTS
    python -m tests.campaign.worker engine FD      (what a worker starts)

Everything but the arithmetic is Nightmill's own. CAMPAIGN_STEP is how long a step takes; `clocks` says how
this host's clock is set wrong. While the file exists that CAMPAIGN_STALE names, the folder CAMPAIGN_FILES
answers ESTALE.
"""

import errno
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

import nightmill.worker.commands.keeper
import nightmill.worker.commands.process
from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.sizes import max_sequences
from nightmill.worker.engine.engine import Engine
from nightmill.worker.runners.base import NOT_A_NUMBER, Admission, Drawn, IntArray, StepBatch
from tests.campaign import clocks
from tests.campaign.texts import CONTEXT, SAMPLING, checksum, draw
from tests.support.own_engine import engine_on, run_module

NAME = "tests.campaign.worker"
OURS = (sys.executable, "-m", NAME)
POISONS = {
    b"!kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    b"!abort": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    b"!exit": lambda: os._exit(3),
}
NAN = b"!nan"  # of such a prompt, the logits are no numbers
AFTER = 5  # tokens that a poison draws before it strikes


class ScriptedRunner:
    """Draws what `texts.draw` says. A prompt that begins with a poison ends the process after some tokens."""

    page_size = 16
    page_kinds = ()
    depth = 2
    arithmetic = Arithmetic(
        runner="checksums", device="none", weights="none", kv="none", kernels="none", model="none"
    )

    def __init__(self, vocab: int, slots: int) -> None:
        self.vocab = vocab
        self.slots = self.max_draws = slots
        self.prompt_grid, self.snapshots = 1, 0
        self.embeds = self.predicts = False
        self.kv_pages = slots * CONTEXT // self.page_size * 2 // 3  # short, so that some are preempted
        self._step = float(os.environ.get("CAMPAIGN_STEP", "0"))
        self._drawn: deque[Drawn] = deque()
        self._slots: dict[int, tuple[int, int, list[float]]] = {}  # checksum so far, seed, parameters
        self._poisons: dict[int, list[Any]] = {}  # tokens left, and what follows

    def launch(self, batch: StepBatch) -> None:
        for admission in batch.admissions:
            self._admit(admission)
        if self._step:
            time.sleep(self._step)
        slots = batch.draws["slot"].tolist()
        self._drawn.append(self.sampled(batch, np.fromiter(map(self._draw, slots), np.int32, len(slots))))

    def mask_room(self, count: int) -> IntArray:
        raise AssertionError("a row of the campaign asks for a mask; none is held to a schema")

    def draw(self, masks: IntArray) -> None:
        """Nothing is masked."""

    def sampled(self, batch: StepBatch, tokens: Any) -> Drawn:
        """What the engine collects."""
        return Drawn(tokens)

    def collect(self) -> Drawn | None:
        return self._drawn.popleft() if self._drawn else None

    def close(self) -> None:
        """Nothing is held."""

    def _admit(self, admission: Admission) -> None:
        sampling = [float(getattr(admission.params, name)) for name in SAMPLING]
        self._slots[admission.slot] = (checksum(admission.token_ids), admission.seed, sampling)
        start = bytes(token for token in admission.token_ids[:8] if token < 256)
        self._poisons.pop(admission.slot, None)
        if start.startswith(NAN):
            self._poisons[admission.slot] = [AFTER, None]
        for prefix, strike in POISONS.items():
            if start.startswith(prefix):
                self._poisons[admission.slot] = [AFTER, strike]

    def _draw(self, slot: int) -> int:
        before, seed, sampling = self._slots[slot]
        if (poison := self._poisons.get(slot)) is not None:
            poison[0] -= 1
            if poison[0] <= 0 and poison[1] is None:
                return NOT_A_NUMBER
            if poison[0] == 0:
                poison[1]()
        token = draw(before, seed, sampling)
        self._slots[slot] = (checksum([token], before), seed, sampling)
        return token


def build_engine(settings: Settings, model: OpenModel) -> Engine:
    """Nightmill's engine on the scripted runner."""
    runner = ScriptedRunner(model.spec.vocab, max_sequences(settings))
    return engine_on(runner, settings, model, context=CONTEXT, token_budget=1024)


class _OurWorker(nightmill.worker.commands.process.WorkerProcess):
    """The worker that `nightmill run` starts."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"command": (*OURS, "worker"), **more})


def _answer_stale() -> None:
    """While a file exists, what opens or moves something in the servers' folder is told ESTALE, as by NFS.

    Python asks audit hooks before it opens, renames, removes or lists; looking at a file (stat) is not asked.
    """
    marker, folder = os.environ.get("CAMPAIGN_STALE"), os.environ.get("CAMPAIGN_FILES")
    if not marker or not folder:
        return

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS and any(_is_in(folder, one) for one in arguments) and Path(marker).exists():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(arguments[0]))

    sys.addaudithook(hook)


_FILE_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.listdir", "os.scandir", "os.link"})


def _is_in(folder: str, argument: object) -> bool:
    return isinstance(argument, str | os.PathLike) and os.fspath(argument).startswith(folder)


def serve() -> None:
    """Be a command of `nightmill`."""
    clocks.install()
    _answer_stale()
    nightmill.worker.commands.keeper.WorkerProcess = _OurWorker  # type: ignore[attr-defined]
    from nightmill.jobs.commands.main import main as run_command

    run_command()


if __name__ == "__main__":
    run_module(NAME, build_engine, serve)
