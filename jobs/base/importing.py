"""Imports of many modules at once, as commands start with: Python's collector waits until they are done.

Some 100,000 objects come to stay, and the collector would visit them again and again while they come.
That was a sixth of the processor time in which `nightmill batch` or a worker starts (Python 3.11, 2 cores).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["imports"]


@contextmanager
def imports() -> Iterator[None]:
    """Collect nothing within the block; what is alive at its end is never visited again.

    For commands, whose process is ours: a program that imports `nightmill.jobs` keeps its own settings.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
