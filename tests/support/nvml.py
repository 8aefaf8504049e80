"""NVIDIA's library as `nvml.py` calls it, for a machine with such GPUs as a test says."""

from typing import Any

NOT_SUPPORTED = 3


class FakeNvml:
    """Its GPUs are of these names. `lacking` names functions that this kind of GPU does not support."""

    def __init__(self, names: tuple[str, ...] = ("H200",), lacking: tuple[str, ...] = ()) -> None:
        self.names = names
        self.lacking = lacking
        self.chosen: int | bytes | None = None
        self.millijoules = 5_000_000

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> int:
            if function in self.lacking:
                return NOT_SUPPORTED
            return int(getattr(self, f"_{function}")(*[getattr(one, "_obj", one) for one in arguments]) or 0)

        return call

    def _nvmlInit_v2(self) -> None: ...

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count.value = len(self.names)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        if index >= len(self.names):
            return 2
        device.value = index + 1
        self.chosen = index
        return 0

    def _nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> None:
        self.chosen = name

    def _nvmlDeviceGetName(self, device: Any, name: Any, length: int) -> None:
        name.value = self.names[device.value - 1].encode()

    def _nvmlDeviceGetTemperature(self, device: Any, kind: int, celsius: Any) -> None:
        celsius.value = 61

    def _nvmlDeviceGetPowerUsage(self, device: Any, milliwatts: Any) -> None:
        milliwatts.value = 312_500

    def _nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> None:
        rates.gpu = 97

    def _nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> None:
        memory.total, memory.used = 1 << 37, 1 << 36

    def _nvmlDeviceGetTotalEnergyConsumption(self, device: Any, millijoules: Any) -> None:
        self.millijoules += 1500
        millijoules.value = self.millijoules
