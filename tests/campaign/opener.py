"""Opens model files and renders a chat, one file after the other, as a worker does: a child of the campaign.

Reads paths from standard input; answers each with a line of JSON. With the path of a sound model as argument,
a thread beside encodes chats with that one all the time, and the answer tells how long the slowest took.
"""

import json
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path

from nightmill.jobs.errors import NightmillError

MEMORY = 1 << 30  # of address space beyond what it has when it begins
CHAT = [{"role": "user", "content": "Hello, w\u00f6rld 123"}]


def main() -> None:
    """Until the end of input."""
    from nightmill.worker.assembly.model import load_model  # noqa: F401 - what it imports is not to count

    beside = Beside(Path(sys.argv[1])) if sys.argv[1:] else None
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for line in sys.stdin:
        path = Path(line.strip())
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = _kib("VmRSS"), time.process_time()
        answer = {"outcome": "accepted", "said": ""}
        try:
            _open(path)
        except NightmillError as error:
            answer = {"outcome": "refused", "said": f"{type(error).__name__}: {error}"}
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            answer = {"outcome": "traceback", "said": f"{type(error).__name__} at {where}: {error}"}
        answer |= {"seconds": time.process_time() - began, "mib": (_kib("VmHWM") - before) / 1024}
        answer["delay"] = beside.slowest() if beside else 0.0
        print(json.dumps(answer), flush=True)


class Beside:
    """Innocent chats, while another model's template does what it does."""

    def __init__(self, path: Path) -> None:
        from nightmill.jobs.base.settings import Settings
        from nightmill.worker.assembly.model import load_model

        self._model = load_model(Settings(model=path))
        self._expected = self._model.encode(CHAT)
        self._slowest = 0.0
        self._began: float | None = None
        self.wrong = False
        threading.Thread(target=self._run, daemon=True).start()

    def slowest(self) -> float:
        """Seconds that the slowest took since last asked; infinite where one was refused or wrong."""
        began = self._began
        waiting = 0.0 if began is None else time.monotonic() - began
        slowest, self._slowest = max(self._slowest, waiting), 0.0
        return float("inf") if self.wrong else slowest

    def _run(self) -> None:
        while True:
            self._began = began = time.monotonic()
            try:
                self.wrong |= self._model.encode(CHAT) != self._expected
            except BaseException:  # whatever it is, the thread goes on, and `slowest` reports the violation
                self.wrong = True
            self._slowest = max(self._slowest, time.monotonic() - began)
            self._began = None
            time.sleep(0.02)


def _open(path: Path) -> None:
    from nightmill.jobs.base.settings import Settings
    from nightmill.worker.assembly.model import load_model

    model = load_model(Settings(model=path))
    ids = model.encode("Hello, w\u00f6rld 123 <|im_end|>")
    model.tokenizer.decode(ids)
    try:
        model.encode(CHAT)
    finally:
        if hasattr(model, "close"):
            model.close()


def _kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(name)


if __name__ == "__main__":
    main()
