"""A GPU's temperature, power, energy and load, from NVML: what NVIDIA's driver has for who watches over GPUs.

It is asked by ctypes, a few microseconds a question, and needs neither CUDA nor the engine's process. What it
does not say, or not for this kind of GPU, is left out.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_CELSIUS = 0  # NVML_TEMPERATURE_GPU


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuProbe:
    """Asks about the GPU that CUDA has under `index`; None: there is none."""

    def __init__(self, index: int | None, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._index = index
        self._load = load
        self._library: Any = None
        self._device = ctypes.c_void_p()
        self.last: dict[str, float] = {}
        """The last figures that were found. Whoever must not wait for a driver that hangs reads this."""

    def refresh(self) -> None:
        """Ask again."""
        self.last = self.read()

    def read(self) -> dict[str, float]:
        """`temperature` (Celsius), `power` (W), `utilization` (0 to 1), `memory_used`, `memory` (bytes)."""
        if self._index is None or not self._found():
            return {}
        found: dict[str, float] = {}
        celsius, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        if self._ask("nvmlDeviceGetTemperature", self._device, _CELSIUS, ctypes.byref(celsius)):
            found["temperature"] = celsius.value
        if self._ask("nvmlDeviceGetPowerUsage", self._device, ctypes.byref(milliwatts)):
            found["power"] = milliwatts.value / 1000
        busy, memory = _Utilization(), _Memory()
        if self._ask("nvmlDeviceGetUtilizationRates", self._device, ctypes.byref(busy)):
            found["utilization"] = busy.gpu / 100
        if self._ask("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(memory)):
            found |= {"memory_used": memory.used, "memory": memory.total}
        return found

    def joules(self) -> float | None:
        """Return the GPU's energy since its driver was loaded; None if it does not tell."""
        millijoules = ctypes.c_ulonglong()
        if self._index is None or not self._found():
            return None
        if not self._ask("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1000

    def _found(self) -> bool:
        """Return True if there is a library that knows the GPU; look for it once."""
        if self._library is None:
            try:
                self._library = self._load(_LIBRARY)
            except OSError:
                log.debug("there is no %s", _LIBRARY)
            if self._library is None or not self._ask("nvmlInit_v2") or not self._find():
                self._index = None
        return self._index is not None

    def _find(self) -> bool:
        """Find the device: NVML counts all GPUs in the order of their slots, CUDA those that it may see."""
        assert self._index is not None
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        if visible and self._index >= len(visible):
            return False
        name = visible[self._index].strip() if visible else str(self._index)
        place = ctypes.byref(self._device)
        if not name.isdecimal():
            return self._ask("nvmlDeviceGetHandleByUUID", name.encode(), place)
        if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and not self._alike():
            return False  # CUDA counts from the fastest
        return self._ask("nvmlDeviceGetHandleByIndex_v2", int(name), place)

    def _alike(self) -> bool:
        """Return True if all GPUs are of one kind, so that none is faster."""
        count, names = ctypes.c_uint(), set()
        if not self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return False
        for number in range(count.value):
            device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            if self._ask("nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(device)):
                self._ask("nvmlDeviceGetName", device, name, len(name))
            names.add(name.value)
        return len(names) == 1

    def _ask(self, function: str, *arguments: Any) -> bool:
        """Call a function, which returns 0 if it has done what it should; an old library may lack it."""
        known = getattr(self._library, function, None)
        return known is not None and bool(known(*arguments) == 0)
