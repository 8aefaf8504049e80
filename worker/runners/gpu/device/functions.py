"""Compiled kernels in use: loaded into a device's context, launched on its stream.

Through `cuda.bindings`, since PyCUDA knows no dependent launch: there, a kernel starts while the one ahead of
it on the stream still runs, fetches what does not depend on it, and waits before it touches the rest.
"""

import ctypes
import re
import struct
from dataclasses import dataclass
from typing import Any

from nightmill.worker.runners.gpu.device.compiler import compile_kernels
from nightmill.worker.runners.gpu.device.device import (
    CudaError,
    Device,
    DeviceLostError,
    KernelLaunchError,
    NoDeviceError,
)
from nightmill.worker.runners.gpu.device.sources import Source, for_element

__all__ = ["Function", "KernelPair", "KernelPairs", "Module", "bindings", "blocks_for", "error_text"]

_ALL_SHARED = 100  # percent of a multiprocessor's memory, the rest being L1
_FEW_ROWS = 320  # of a step, up to which kernels had better overlap (`KernelPair`)


class Module:
    """A cubin, loaded."""

    def __init__(self, device: Device, cubin: bytes, name: str) -> None:
        driver = bindings()
        self.name = name
        self._device = device
        self._driver = driver
        self._module = self._check(driver.cuModuleLoadData(cubin), f"loading {name}")
        device.at_close(self._unload)
        device.stuck_waits.attach(driver, self._module, cubin)

    @staticmethod
    def of(device: Device, source: Source) -> "Module":
        """That file, for the device's element and KV cache, from the cubins that are kept or compiled now."""
        path, options = compiled = for_element(source, device.element, device.kv)
        cubin = device.cubins.get(compiled) or compile_kernels(path, options, device.architecture)
        return Module(device, cubin, path.name)

    def function(
        self, name: str, arguments: str = "", *, shared: int = 0, dependent: bool = False,
        all_shared: bool = False, cluster: int = 1,
    ) -> "Function":  # fmt: skip
        """A kernel by its extern "C" name.

        arguments   one letter each, as in `struct`: P pointer, i int, I unsigned, q/Q 64 bits, f float,
                    128s bytes
        shared      bytes of dynamic shared memory that launches may ask for, where that and what the kernel
                    declares are over 48 KiB
        dependent   the kernel calls `wait_for_previous` (common.cuh) before it reads or writes what others do
        all_shared  leave it no more L1 than must be: kernels overlap on a multiprocessor only where its
                    memory is divided as both want it. Costs bandwidth, since loads land in L1
        cluster     blocks along z, at most 8, that run at the same time and reach each other's shared memory;
                    divides the grid. Needs compute capability 9.0 where it is not 1
        """
        driver, doing = self._driver, f"looking for the kernel {name} in {self.name}"
        function = self._check(driver.cuModuleGetFunction(self._module, name.encode()), doing)
        if shared:
            self._check_shared(name, function, shared)
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(driver.cuFuncSetAttribute(function, attribute, shared), doing)
        if all_shared:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._check(driver.cuFuncSetAttribute(function, attribute, _ALL_SHARED), doing)
        return Function(self._device, function, name, arguments, dependent, cluster)

    def _check_shared(self, name: str, function: Any, shared: int) -> None:
        """Raise CudaError where a block cannot have so much dynamic shared memory beside what it declares."""
        needed, most = shared + _declared(self._driver, function), self._device.features.block_shared
        if needed > most:
            raise CudaError(
                f"the kernel {name} takes {needed:,} bytes of shared memory; a block of {self._device.name} "
                f"has at most {most:,}"
            )

    def _unload(self) -> None:
        self._driver.cuModuleUnload(self._module)

    def _check(self, result: tuple[Any, ...], doing: str) -> Any:
        status, *values = result
        if int(status) != 0:
            raise self._device.named(CudaError(error_text(status)), doing)
        return values[0] if values else None


class Function:
    """A kernel that can be launched on the device's stream."""

    def __init__(
        self, device: Device, function: Any, name: str, arguments: str, dependent: bool, cluster: int
    ) -> None:
        driver = bindings()
        self.name = name
        self._device = device
        self._driver = driver
        self._function = function
        letters = re.findall(r"\d*[a-zA-Z]", arguments)
        self._packing = struct.Struct("@" + "".join(letters))
        self._values = ctypes.create_string_buffer(max(self._packing.size, 1))
        starts = (
            struct.calcsize("@" + "".join(letters[:i]) + "0" + letters[i][-1]) for i in range(len(letters))
        )
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * max(len(letters), 1))(*(first + start for start in starts))
        self._parameters = ctypes.addressof(self._pointers)
        self._config = driver.CUlaunchConfig()
        self._config.hStream = driver.CUstream(device.stream_handle)
        attributes = []
        if dependent and device.features.dependent:
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            attributes.append(attribute)
        if cluster > 1:
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = 1, 1, cluster
            attribute.value = value
            attributes.append(attribute)
        self._config.attrs = attributes
        self._config.numAttrs = len(attributes)
        self._apart = self._config
        if dependent and attributes:
            self._apart = driver.CUlaunchConfig()
            self._apart.hStream = self._config.hStream
            self._apart.attrs = attributes[1:]
            self._apart.numAttrs = len(attributes) - 1

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, int, int],
        *arguments: int | float | bytes,
        shared: int = 0,
        apart: bool = False,
    ) -> None:
        """Queue a launch. Raises KernelLaunchError, or DeviceLostError where an earlier kernel failed.

        apart  start it only once the kernel ahead has ended, although it is `dependent`
        """
        self._packing.pack_into(self._values, 0, *arguments)
        config = self._apart if apart else self._config
        config.gridDimX, config.gridDimY = grid[0], grid[1]
        config.gridDimZ = grid[2] if len(grid) > 2 else 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared
        (status,) = self._driver.cuLaunchKernelEx(config, self._function, self._parameters, 0)
        if status != 0:
            self._refused(status, grid, block, arguments, shared)

    def load(self) -> bool:
        """Load it now, as its first launch would, which a capture cannot; False if the driver is too old."""
        loads = getattr(self._driver, "cuFuncLoad", None)
        try:
            return loads is not None and int(loads(self._function)[0]) == 0
        except RuntimeError:  # the bindings know it, the driver does not (before CUDA 12.4)
            return False

    def blocks_at_once(self, threads: int, shared: int) -> int:
        """Blocks of this kernel that a multiprocessor holds."""
        driver = self._driver
        status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared)
        if status != 0:
            raise self._device.named(
                CudaError(error_text(status)), f"asking for the occupancy of {self.name}"
            )
        if self._device.pretended is None:
            return int(blocks)
        needed = shared + _declared(driver, self._function)
        return min(int(blocks), self._device.features.blocks_held(threads, needed))

    def _refused(
        self,
        status: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        shared: int,
    ) -> None:
        text = error_text(status)
        named = self._device.named(CudaError(text), f"launching {self.name}")
        if isinstance(named, DeviceLostError):
            raise named
        shown = tuple(f"{len(a)} bytes" if isinstance(a, bytes) else a for a in arguments)
        raise KernelLaunchError(
            f"{self.name} with grid {grid}, block {block}, {shared:,} bytes of shared memory and "
            f"arguments {shown} was refused: {text}"
        )


@dataclass(frozen=True, slots=True)
class KernelPair:
    """A kernel, twice.

    few   for steps of few rows: leaves L1 no more than must be, so that kernels overlap (`Module.function`)
    many  with L1 as the driver divides it: from some hundred rows on, bandwidth counts for more. Steps of 256
          sequences took 1.54 and 1.64 ms, of 512 2.54 and 2.40, of 1,024 4.53 and 4.22 (Qwen2.5-0.5B, H200)
    """

    few: Function
    many: Function

    def of(self, rows: int) -> Function:
        return self.few if rows <= _FEW_ROWS else self.many

    def load(self) -> bool:
        """Load both now, as `Function.load`."""
        return self.few.load() and self.many.load()


class KernelPairs:
    """The kernels of a file, each of them twice (`KernelPair`)."""

    def __init__(self, device: Device, source: Source) -> None:
        self._few, self._many = Module.of(device, source), Module.of(device, source)

    def function(
        self, name: str, arguments: str, *, shared: int = 0, dependent: bool = True, cluster: int = 1
    ) -> KernelPair:
        """A kernel by its name; the arguments are those of `Module.function`."""
        few, many = (
            module.function(
                name, arguments, shared=shared, dependent=dependent, all_shared=module is self._few,
                cluster=cluster,
            )
            for module in (self._few, self._many)
        )  # fmt: skip
        return KernelPair(few, many)


def blocks_for(threads: int) -> tuple[int, int]:
    """The grid of blocks of 256 threads."""
    return -(-threads // 256), 1


def _declared(driver: Any, function: Any) -> int:
    """Bytes of shared memory that a kernel declares."""
    status, size = driver.cuFuncGetAttribute(
        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function
    )
    if int(status) != 0:
        raise CudaError(f"a kernel's shared memory is not known: {error_text(status)}")
    return int(size)


def bindings() -> Any:
    """`cuda.bindings.driver`; raises NoDeviceError where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoDeviceError(
            f"cuda.bindings cannot be imported ({error}): install `nightmill[cuda]`; `--reference` generates "
            "without a GPU"
        ) from error
    return driver


def error_text(status: Any) -> str:
    """Return the driver's message for a status."""
    text = bindings().cuGetErrorString(status)[1]
    return text.decode() if isinstance(text, bytes) else str(status)
