"""What the host makes of the record that a kernel leaves whose wait did not end."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.runners.gpu.device.waits import StuckWaits

BOUNDED, PLAIN = b"..nightmill_stuck_wait..", b"..."


class Modules:
    """Stands for the driver: notes to which modules an address was given."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.given: list[str] = []
        self.record: Any = None

    def pinned(self, size: int, dtype: Any) -> Any:
        self.record = np.zeros(size, dtype)
        return self.record

    @property
    def driver(self) -> Any:
        def copy(address: str, source: int, size: int) -> tuple[int]:
            self.given.append(address)
            return (0,)

        return SimpleNamespace(
            cuModuleGetGlobal=lambda module, name: (self.status, module, 8), cuMemcpyHtoD=copy
        )

    def leave(self, kind: bytes, kernel: bytes, barrier: int) -> None:
        """As `WaitLimit` in `waits.cuh` does."""
        words = self.record[:32].view(np.int32)
        words[:] = (1, 1, 7, 0, 2, 384, barrier, 1)
        self.record[32 : 32 + len(kind)] = np.frombuffer(kind, np.uint8)
        self.record[56 : 56 + len(kernel)] = np.frombuffer(kernel, np.uint8)


def test_only_modules_with_bounded_waits_get_the_record() -> None:
    modules = Modules()
    waits = StuckWaits(modules.pinned)
    waits.attach(modules.driver, "plain", PLAIN)
    assert modules.record is None
    for name in ("first", "second"):
        waits.attach(modules.driver, name, BOUNDED)
    assert modules.given == ["first", "second"]
    assert waits.found() == ""


@pytest.mark.parametrize(
    ("kind", "barrier", "shown"),
    [
        (b"named barrier", 3, "named barrier 3"),
        (b"mbarrier", 0x4A8, "mbarrier at 0x4a8 of shared memory, phase of parity 1"),
    ],
)
def test_a_wait_that_did_not_end_is_named(kind: bytes, barrier: int, shown: str) -> None:
    modules = Modules()
    waits = StuckWaits(modules.pinned)
    waits.attach(modules.driver, "module", BOUNDED)
    modules.leave(kind, b"float_3_8_4_12_6_1_1_1_2", barrier)
    assert waits.found() == (
        "the kernel float_3_8_4_12_6_1_1_1_2 waited for an arrival that did not come: block (7, 0, 2), "
        f"thread 384, {shown}"
    )


def test_a_module_that_cannot_be_told_is_an_error() -> None:
    modules = Modules(status=500)
    with pytest.raises(RunnerError, match="cannot be told where to report: 500"):
        StuckWaits(modules.pinned).attach(modules.driver, "module", BOUNDED)
