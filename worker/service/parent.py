"""The end of a worker with the process that started it: its standard input is a pipe that closes then."""

import os
import signal
import sys
import threading

END_WITH_STDIN = "--end-with-stdin"
"""The option of a worker that is to end with its standard input."""


def end_with_stdin() -> None:
    """Drain this worker, as at SIGTERM, once its standard input ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
