"""What NVML says of a GPU is of the GPU that CUDA means, or nothing is said."""

from typing import Any

import pytest

from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from tests.support.nvml import FakeNvml

ALL = {"temperature": 61, "power": 312.5, "utilization": 0.97, "memory_used": 1 << 36, "memory": 1 << 37}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs are visible, in CUDA's order."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("names", "environment", "index", "chosen"),
    [
        (("H100", "H100"), {}, 1, 1),
        (("H100", "H100", "H100"), {"CUDA_VISIBLE_DEVICES": "2, 0"}, 0, 2),
        (("H100", "H100"), {"CUDA_VISIBLE_DEVICES": "0"}, 1, None),  # CUDA sees one
        (("T4", "H100"), {"CUDA_VISIBLE_DEVICES": "GPU-8932"}, 0, b"GPU-8932"),
        (("T4", "H100"), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, 0),
        (("T4", "H100"), {}, 0, None),  # to CUDA the H100 is the first
        (("H100",), {}, None, None),
    ],
)
def test_the_gpu_is_the_one_that_cuda_means(
    monkeypatch: pytest.MonkeyPatch, names: Any, environment: dict[str, str], index: Any, chosen: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    library = FakeNvml(names)
    probe = GpuProbe(index, lambda name: library)
    assert probe.read() == ({} if chosen is None else ALL)
    assert chosen is None or library.chosen == chosen


def test_what_is_not_supported_or_not_installed_is_left_out() -> None:
    library = FakeNvml(lacking=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"))
    assert GpuProbe(0, lambda name: library).read().keys() == {"temperature", "memory_used", "memory"}
    assert GpuProbe(0, lambda name: FakeNvml(lacking=("nvmlInit_v2",))).read() == {}
    asked: list[str] = []

    def absent(name: str) -> Any:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    probe = GpuProbe(0, absent)
    assert probe.read() == probe.read() == {} and len(asked) == 1


def test_energy_is_counted_where_the_gpu_tells() -> None:
    library = FakeNvml()
    probe = GpuProbe(0, lambda name: library)
    assert [probe.joules(), probe.joules()] == [5001.5, 5003.0]
    lacking = FakeNvml(lacking=("nvmlDeviceGetTotalEnergyConsumption",))
    assert GpuProbe(0, lambda name: lacking).joules() is None and GpuProbe(None).joules() is None
