"""A file's bytes on their way to the GPU: it fetches one pinned buffer while threads fill the other."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.gpu.device.device import Device

__all__ = ["Staging"]

STAGING_BYTES = 32 << 20
_COPY_THREADS = 4


class Staging:
    """Two pinned buffers of `size` bytes, and their twins on the device."""

    def __init__(self, device: Device, size: int = STAGING_BYTES) -> None:
        self.size = size
        self._device = device
        self._pinned = [device.pinned(size, np.uint8) for _ in range(2)]
        self._raw = [device.allocate(size, "staged weights") for _ in range(2)]
        self._free = [device.event() for _ in range(2)]
        self._turn = 0
        self._pool = ThreadPoolExecutor(_COPY_THREADS, "weights")

    def parts(self, raw: npt.NDArray[np.uint8], unit: int) -> Iterator[tuple[int, int, int]]:
        """Bring bytes to the device, as many whole units of them at a time as fit.

        Yields where a part is, its first byte's place in `raw`, and how many it has. They are there until the
        next but one is asked for: what reads them is queued before the next.
        """
        step = self.size // unit * unit
        assert step, f"{unit:,} bytes are more than are staged"
        for start in range(0, len(raw), step):
            part = raw[start : start + step]
            turn, self._turn = self._turn, 1 - self._turn
            pinned = self._pinned[turn][: len(part)]
            self._device.wait(self._free[turn], "the upload of weights")
            share = -(-len(part) // _COPY_THREADS)
            pieces = [slice(first, first + share) for first in range(0, len(part), share)]
            list(self._pool.map(lambda piece, to=pinned, of=part: np.copyto(to[piece], of[piece]), pieces))
            self._device.copy_in(self._raw[turn], pinned)
            yield self._raw[turn], start, len(part)
            self._free[turn].record(self._device.stream)

    def close(self) -> None:
        """Give the memory back."""
        self._device.synchronize()
        self._pool.shutdown()
        for address in self._raw:
            self._device.free(address)
        self._raw, self._pinned = [], []
