"""A CUDA driver that computes nothing: what is launched is held against the compiled kernels, and noted.

Stands for PyCUDA, cuda.bindings and nvmath, with as much of them as the GPU runner uses. Kernels are compiled
by nvcc; what they take is read from their machine code, so a launcher that names another kernel, passes other
arguments, asks for too much shared memory or describes a matrix that is not in its memory fails here, where
there is no GPU. What kernels compute is for `tests/gpu`. Where nvcc is missing, too, parameters and names are
not compared; grids, blocks and matrices still are.
"""

import bisect
import ctypes
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nightmill.worker.runners.gpu import self_test
from nightmill.worker.runners.gpu.device import compiler as compilers
from nightmill.worker.runners.gpu.device import functions
from nightmill.worker.runners.gpu.products import chooser
from tests.unit.runners.recorded_kernels import Kernel, compile_recorded, kernels_of, nvcc_is_there

# Of a block, by compute capability; (8, 0) stands for all from there on: 8.6, 8.9 and 12.0 have least.
MOST_SHARED = {(9, 0): 227 << 10, (8, 0): 99 << 10}
HOPPER, AMPERE = (9, 0), (8, 0)
MOST_THREADS = 1024
MULTIPROCESSORS = 16
_SIZES = {"P": 8, "i": 4, "I": 4, "q": 8, "Q": 8, "f": 4, "d": 8}
_PLAIN = "CU_TENSOR_MAP_SWIZZLE_NONE"
_MAXIMUM_SHARED = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"


class DriverError(Exception):
    """What PyCUDA raises: also its RuntimeError is none of Python's."""


@dataclass
class RecordedDriver:
    """Install it, then use `Device` and all that is built on it.

    launches  how often each kernel was launched; `library`: products by cuBLASLt
    types     of numbers, as tensor maps (FLOAT16) and the library (2: half) are told
    checked   kernels whose parameters were compared
    odd       numbers of the library's algorithms, from 0 on, whose results have another digest than all else
    ran       the numbers of those that ran
    opened    how often each kernel was launched outside of captures
    unloaded  kernels that a capture launched before anything had loaded them
    """

    capability: tuple[int, int]
    launches: Counter[str] = field(default_factory=Counter)
    types: set[str] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)
    odd: frozenset[int] = frozenset()
    ran: list[int] = field(default_factory=list)
    opened: Counter[str] = field(default_factory=Counter)
    unloaded: set[str] = field(default_factory=set)
    _captures: bool = False
    _starts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _last: int | None = None  # the library's algorithm that ran last, if no kernel did after it
    _digests: int = 0
    _ticks: Any = field(default_factory=lambda: itertools.count(1))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put the modules in place and check every kernel that is looked up."""
        pycuda, compiler, library = self._pycuda(), _module("pycuda.compiler"), self._library()
        compiler.compile = compile_recorded
        for module in (pycuda, compiler, self._bindings(), *library):
            patch.setitem(sys.modules, module.__name__, module)
            parent = module.__name__.rpartition(".")[0]
            for name in (parent.partition(".")[0], parent):
                if name and name not in sys.modules:
                    patch.setitem(sys.modules, name, _module(name))
            if parent:
                patch.setattr(sys.modules[parent], module.__name__.rpartition(".")[2], module, raising=False)
        patch.setattr(chooser, "choices_file", lambda device, beside: None)  # each start times all
        if not nvcc_is_there():
            patch.setattr(compilers, "find_nvcc", lambda: "")
            patch.setattr(compilers, "compiler_version", lambda nvcc: "")
        found = functions.Module.function

        def checked(module: Any, name: str, arguments: str = "", **options: Any) -> functions.Function:
            function = found(module, name, arguments, **options)
            letters = re.findall(r"\d*[a-zA-Z]", arguments)
            given = [int(letter[:-1]) if letter[-1] == "s" else _SIZES[letter] for letter in letters]
            taken = function._function.parameters
            assert taken is None or given == taken, f"{name} takes {taken} bytes; the launcher passes {given}"
            self.checked.add(name)
            return function

        patch.setattr(functions.Module, "function", checked)
        patch.setattr(self_test, "_compare", _nothing)  # nothing is computed

    def allocate(self, size: int) -> SimpleNamespace:
        """Addresses that nothing else has, with a gap behind."""
        start = (self._ends[-1] if self._ends else 1 << 40) + 4096 & ~511
        self._starts.append(start)
        self._ends.append(start + size)
        return _Allocation(start)

    def holds(self, address: int, size: int) -> bool:
        """Whether these bytes are within one allocation."""
        index = bisect.bisect(self._starts, address) - 1
        return index >= 0 and address + size <= self._ends[index]

    def _pycuda(self) -> ModuleType:
        driver = _module("pycuda.driver")
        driver.Error = driver.MemoryError = driver.CompileError = DriverError
        context = SimpleNamespace(push=_nothing, pop=_nothing, detach=_nothing)
        handle = SimpleNamespace(
            retain_primary_context=lambda: context, name=lambda: "recorded", total_memory=lambda: 140 << 30,
            compute_capability=lambda: self.capability, get_attribute=lambda attribute: attribute,
        )  # fmt: skip

        class Device:
            count = staticmethod(lambda: 1)

            def __new__(cls, index: int) -> SimpleNamespace:  # type: ignore[misc]
                return handle

        class Event:
            def __init__(self, flags: int) -> None:
                self.record = self.synchronize = _nothing

            def time_till(self, other: Any) -> float:
                return 1.0 + next(ticks) * 7919 % 1000 / 1000  # milliseconds; any way may be the fastest

            time_since = time_till

        def download(target: np.ndarray, *source: Any) -> None:
            target[...] = 0
            if self.launches["digest"] > self._digests:  # of what ran before it
                self._digests = self.launches["digest"]
                target[...] = self._last in self.odd

        ticks = self._ticks
        driver.init, driver.get_driver_version = _nothing, lambda: 13_000
        driver.Device, driver.Event = Device, Event
        driver.Stream = lambda: SimpleNamespace(handle=7, synchronize=_nothing)
        driver.Memcpy2D = _Copy
        driver.device_attribute = SimpleNamespace(  # an H200's
            MULTIPROCESSOR_COUNT=MULTIPROCESSORS, CLOCK_RATE=1_980_000, MEMORY_CLOCK_RATE=3_201_000,
            GLOBAL_MEMORY_BUS_WIDTH=6144,
        )  # fmt: skip
        driver.event_flags = SimpleNamespace(DEFAULT=0, DISABLE_TIMING=2)
        driver.mem_get_info = lambda: (130 << 30, 140 << 30)
        driver.mem_alloc = self.allocate
        driver.pagelocked_zeros = np.zeros
        driver.memcpy_htod = driver.memcpy_htod_async = driver.memset_d8_async = _nothing
        driver.memcpy_dtod_async = driver.memset_d2d8_async = _nothing
        driver.memcpy_dtoh = driver.memcpy_dtoh_async = download
        return driver

    def _bindings(self) -> ModuleType:
        driver = _module("cuda.bindings.driver")
        for name in ("CUlaunchConfig", "CUstream", "CUlaunchAttribute", "CUlaunchAttributeValue"):
            setattr(driver, name, _Structure)
        for name in ("cuuint32_t", "cuuint64_t"):
            setattr(driver, name, int)
        for name in (
            "CUfunction_attribute", "CUlaunchAttributeID", "CUtensorMapDataType", "CUtensorMapInterleave",
            "CUtensorMapSwizzle", "CUtensorMapL2promotion", "CUtensorMapFloatOOBfill", "CUstreamCaptureMode",
        ):  # fmt: skip
            setattr(driver, name, _Names())
        driver.cuGetErrorString = lambda status: (0, b"not found")
        driver.cuModuleLoadData = lambda cubin: (0, kernels_of(cubin) if cubin else None)
        driver.cuModuleGetFunction = _find
        driver.cuFuncSetAttribute = self._set_attribute
        driver.cuFuncGetAttribute = lambda attribute, kernel: (0, 0 if kernel is None else kernel.declared)
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor = lambda kernel, threads, shared: (0, 1)
        driver.cuLaunchKernelEx = self._launch
        driver.cuTensorMapEncodeTiled = self._encode
        driver.cuStreamBeginCapture = lambda stream, mode: self._capturing(True)
        driver.cuStreamEndCapture = lambda stream: (*self._capturing(False), "graph")
        driver.cuFuncLoad = _load
        driver.cuGraphGetNodes = lambda graph, most: (0, [], 1)
        driver.cuGraphInstantiate = lambda graph, flags: (0, "executable")
        for name in (
            "cuModuleUnload", "cuGraphDestroy", "cuGraphExecDestroy", "cuGraphLaunch", "cuGraphUpload",
        ):  # fmt: skip
            setattr(driver, name, lambda *arguments: (0,))
        return driver

    def _library(self) -> tuple[ModuleType, ModuleType]:
        cublas, lt = _module("nvmath.bindings.cublas"), _module("nvmath.bindings.cublasLt")
        cublas.ComputeType = cublas.Operation = lt.MatmulDescAttribute = _Numbers()
        lt.MatmulPreferenceAttribute = _Numbers()
        lt.cuBLASLtError = DriverError
        lt.matmul_heuristic_result_dtype = np.dtype([("algo", "u8", 8), ("workspace_size", "u8")])
        for name in ("create", "matmul_desc_create", "matmul_preference_create"):
            setattr(lt, name, lambda *arguments: 1)
        lt.matrix_layout_create = self._layout
        for name in ("matmul_desc_set_attribute", "matmul_preference_set_attribute", "matmul_algo_check"):
            setattr(lt, name, _nothing)
        lt.destroy = _nothing
        lt.get_version = lambda: 130100

        size = lt.matmul_heuristic_result_dtype.itemsize

        def heuristic(*arguments: Any) -> None:
            ctypes.c_int32.from_address(arguments[-1]).value = 2
            for number in range(2):
                ctypes.c_uint64.from_address(arguments[-2] + number * size).value = number + 1

        def matmul(*arguments: Any) -> None:
            self.launches.update(library=1)
            self._last = ctypes.c_uint64.from_address(arguments[12]).value - 1
            self.ran.append(self._last)

        lt.matmul_algo_get_heuristic = heuristic
        lt.matmul = matmul
        return cublas, lt

    def _layout(self, kind: int, rows: int, columns: int, stride: int) -> int:
        self.types.add(str(kind))
        return 1

    def _capturing(self, begins: bool) -> tuple[int]:
        self._captures = begins
        return (0,)

    def _launch(self, config: Any, kernel: Kernel, parameters: int, extra: int) -> tuple[int]:
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        threads = config.blockDimX * config.blockDimY * config.blockDimZ
        assert min(grid) > 0, f"{kernel.name}: a grid of {grid}"
        assert max(grid[1:]) < 65536, f"{kernel.name}: a grid of {grid}"
        assert 0 < threads <= MOST_THREADS, f"{kernel.name}: {threads} threads"
        shared = config.sharedMemBytes
        assert shared <= kernel.most, f"{kernel.name}: {shared} bytes of {kernel.most}"
        self.launches[kernel.name] += 1
        if not self._captures:
            self.opened[kernel.name] += 1
            kernel.loaded = True
        elif not kernel.loaded:
            self.unloaded.add(kernel.name)
        if kernel.name not in ("digest", "swiglu", "geglu"):  # which follow a product
            self._last = None
        return (0,)

    def _set_attribute(self, kernel: Kernel, attribute: str, value: int) -> tuple[int]:
        if attribute == _MAXIMUM_SHARED:
            most = MOST_SHARED[self.capability]
            assert value + kernel.declared <= most, (
                f"{kernel.name}: {value} + {kernel.declared} of {most} bytes"
            )
            kernel.most = max(kernel.most, value)
        return (0,)

    def _encode(
        self, kind: str, rank: int, address: int, sizes: Sequence[int], strides: Sequence[int],
        box: Sequence[int], steps: Sequence[int], *modes: str,
    ) -> tuple[int, Any]:  # fmt: skip
        sizes_of = {"UINT8": 1, "FLOAT32": 4, "FLOAT64": 8}
        item = sizes_of.get(kind.rpartition("_")[2], 2)
        self.types.add(kind.rpartition("_")[2])
        assert len(sizes) == len(box) == len(steps) == len(strides) + 1 == rank
        assert address % 16 == 0
        assert all(stride % 16 == 0 for stride in strides)
        if _PLAIN in modes:
            assert box[0] * item % 16 == 0
        else:
            assert box[0] * item == 128, "a row of a box is as wide as the swizzle"
        assert all(1 <= count <= 256 for count in box)
        assert all(count > 0 for count in sizes)
        assert self.holds(address, sizes[-1] * strides[-1]), (
            f"{sizes} at {address:#x} is not in one allocation"
        )
        room = ctypes.create_string_buffer(128)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(room), room=room)


def record(capability: tuple[int, int], patch: pytest.MonkeyPatch, cubins: Path) -> RecordedDriver:
    """Install a driver of that compute capability.

    cubins  of all test processes, since files appear there whole (`gpu.device.compiler`)
    """
    patch.setenv("XDG_CACHE_HOME", str(cubins))
    recorded = RecordedDriver(capability)
    recorded.install(patch)
    return recorded


class _Allocation:
    def __init__(self, start: int) -> None:
        self._start = start
        self.free = _nothing

    def __int__(self) -> int:
        return self._start


class _Copy:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing

    def __call__(self, stream: Any) -> None:
        pass


class _Structure:
    """Of the driver; members are made where they are named."""

    def __init__(self, *values: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = _Structure()
        setattr(self, name, member)
        return member


class _Names:
    """An enumeration whose members are their names."""

    def __getattr__(self, name: str) -> str:
        return name


class _Numbers:
    """An enumeration whose members are 1."""

    def __getattr__(self, name: str) -> int:
        return 1

    __getitem__ = __getattr__


def _nothing(*arguments: Any) -> None:
    pass


def _module(name: str) -> Any:
    return ModuleType(name)


def _load(kernel: Kernel) -> tuple[int]:
    kernel.loaded = True
    return (0,)


def _find(kernels: dict[str, Kernel] | None, name: bytes) -> tuple[int, Kernel | None]:
    kernel = Kernel(name.decode(), None, 0) if kernels is None else kernels.get(name.decode())
    return (500, None) if kernel is None else (0, kernel)


def install_uncompiled(
    patch: pytest.MonkeyPatch, cubins: Path, capability: tuple[int, int]
) -> RecordedDriver:
    """A driver whose kernels nobody compiles, even where nvcc is: their parameters are not compared."""
    patch.setenv("XDG_CACHE_HOME", str(cubins))
    recorded = RecordedDriver(capability)
    recorded.install(patch)
    patch.setattr(compilers, "find_nvcc", lambda: "")
    patch.setattr(compilers, "compiler_version", lambda nvcc: "")
    return recorded
