"""Holds the device back while the host queues work, so that it then runs without waiting for the host."""

import numpy as np

from worker.runners.gpu.device import CudaError, Device
from worker.runners.gpu.functions import bindings, error_text

__all__ = ["Gate"]


class Gate:
    """A context manager: what its body queues on the device's stream starts when the body ends.

    A kernel can take less time than its launch: timed otherwise, all would look alike, and on a busy host the
    best would be chosen by chance. The body must not wait for the device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._turn = 0
        self._opened = device.pinned(1, np.uint32)
        self._address = self._opened.ctypes.data  # the device's, too: addresses are unified

    def __enter__(self) -> None:
        """Close it. Raises CudaError where the driver cannot hold a stream back."""
        driver = bindings()
        self._turn += 1
        (status,) = driver.cuStreamWaitValue32(
            driver.CUstream(self._device.stream_handle), driver.CUdeviceptr(self._address), self._turn,
            int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ),
        )  # fmt: skip
        if status != 0:
            raise self._device.named(CudaError(error_text(status)), "holding the stream back")

    def __exit__(self, *exc_info: object) -> None:
        """Open it, whatever happened: a stream that is held back never ends."""
        self._opened[0] = self._turn
