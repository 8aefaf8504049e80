"""Reports of waits that did not end, which kernels built with BOUNDED_WAITS leave behind.

Kernels wait inside a block for copies and for each other (`cuda/common/waits.cuh`). As built for service,
such a wait has no limit: a lost arrival would be a GPU that is busy for ever. Built with the option, the
first thread that has waited for two seconds writes who it is to memory of the host, which outlives the
context, and traps. Machine code without the option knows nothing of it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.jobs.errors import RunnerError

__all__ = ["BOUNDED_WAITS", "StuckWaits"]

BOUNDED_WAITS = "-DNIGHTMILL_BOUNDED_WAITS"
"""The option for nvcc."""

_POINTER = b"nightmill_stuck_wait"  # the variable of a module that has the record's address
_RECORD = np.dtype(
    [
        ("taken", "<i4"),
        ("written", "<i4"),
        ("block", "<i4", 3),
        ("thread", "<i4"),
        ("barrier", "<i4"),
        ("parity", "<i4"),
        ("kind", "S24"),
        ("kernel", "S120"),
    ]
)


class StuckWaits:
    """The record that all modules of a device share; allocated for the first that asks for it.

    pinned  allocates a zeroed host array that kernels can write to
    """

    def __init__(self, pinned: Callable[[int, npt.DTypeLike], npt.NDArray[Any]]) -> None:
        self._pinned = pinned
        self._record: npt.NDArray[Any] | None = None

    def attach(self, driver: Any, module: Any, cubin: bytes) -> None:
        """Give a module the record's address, if the cubin that it was loaded from has BOUNDED_WAITS."""
        if _POINTER not in cubin:
            return
        if self._record is None:
            self._record = self._pinned(_RECORD.itemsize, np.uint8)
        status, address, _ = driver.cuModuleGetGlobal(module, _POINTER)
        if int(status) == 0:
            place = np.array([self._record.ctypes.data], dtype=np.uint64)
            (status,) = driver.cuMemcpyHtoD(address, place.ctypes.data, place.nbytes)
        if int(status) != 0:
            raise RunnerError(f"kernels with bounded waits cannot be told where to report: {status}")

    def found(self) -> str:
        """The wait that did not end, for a person; empty where none is known."""
        if self._record is None:
            return ""
        (record,) = self._record.view(_RECORD)
        if not record["written"]:
            return ""
        kernel, block = record["kernel"].decode(), ", ".join(map(str, record["block"].tolist()))
        which = f"{record['kind'].decode()} {record['barrier']}"
        if record["kind"] == b"mbarrier":
            which = f"mbarrier at {record['barrier']:#x} of shared memory, phase of parity {record['parity']}"
        return (
            f"the kernel {kernel} waited for an arrival that did not come: block ({block}), "
            f"thread {record['thread']}, {which}"
        )
