"""Records the launches of a decode step once per size, and replays them with one call.

PyCUDA has no graphs: `cuda.bindings.driver` captures what PyCUDA and cuBLASLt queue on the stream. A launch
costs the host 7.4 us through PyCUDA, a node of a graph 0.9 us on the GPU (H200, CUDA 13.0).
"""

import logging
from collections.abc import Callable
from typing import Any

from nightmill.worker.runners.gpu.device.device import CudaError, Device

__all__ = ["Graph", "bucket_of", "buckets"]

log = logging.getLogger(__name__)


def bucket_of(sequences: int) -> int:
    """The batch size that `sequences` are padded to: at most a fifth more, an eighth from 64 on."""
    step = 1 if sequences <= 8 else 2 if sequences <= 16 else 4 if sequences <= 32 else 8
    if sequences > 64:
        step = 1 << max(3, (sequences - 1).bit_length() - 4)
    return -(-sequences // step) * step


def buckets(slots: int) -> list[int]:
    """List all batch sizes up to the one that holds `slots` sequences."""
    return sorted({min(bucket_of(count), slots) for count in range(1, slots + 1)})


class Graph:
    """A captured sequence of launches, those that `record` queues, ready to be replayed; `nodes` of them."""

    def __init__(self, device: Device, record: Callable[[], None]) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._device = device
        self._stream = driver.CUstream(device.stream_handle)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check(driver.cuStreamBeginCapture(self._stream, mode), "starting a capture")
        try:
            record()
        except BaseException:  # whatever it was goes on up; a stream left capturing could run nothing more
            driver.cuStreamEndCapture(self._stream)
            raise
        graph = self._check(driver.cuStreamEndCapture(self._stream), "ending a capture")
        try:
            self.nodes = int(self._check(driver.cuGraphGetNodes(graph, 0), "counting launches")[1])
            self._executable = self._check(driver.cuGraphInstantiate(graph, 0), "making a graph executable")
            # Else its first replay would wait for that.
            self._check(driver.cuGraphUpload(self._executable, self._stream), "uploading a graph")
        finally:
            driver.cuGraphDestroy(graph)

    def launch(self) -> None:
        """Queue a replay."""
        (status,) = self._driver.cuGraphLaunch(self._executable, self._stream)
        if status != 0:
            self._check((status,), "launching a graph")

    def close(self) -> None:
        """Let go of the graph; nothing may be running."""
        if self._executable is not None:
            self._driver.cuGraphExecDestroy(self._executable)
            self._executable = None

    def _check(self, result: tuple[Any, ...], doing: str) -> Any:
        status, *values = result
        if int(status) != 0:
            name = self._driver.cuGetErrorString(status)[1]
            text = name.decode() if isinstance(name, bytes) else str(status)
            raise self._device.named(CudaError(text), doing)
        return (values if len(values) > 1 else values[0]) if values else None
