"""One GPU, owned by one thread: context, stream, memory, kernels; the border where CUDA's errors get names.

The primary context is retained, so that cuBLAS and graphs, which use the CUDA runtime, see the same memory.
PyCUDA keeps a stack of contexts per thread and aborts the process where one is left on it: `close` (also run
at exit) frees everything, pops and releases, in this order.

CudaError
├── NoDeviceError            no driver, or no GPU of that index
├── DeviceMemoryError        an allocation failed; says what is free
├── KernelLaunchError        a launch was refused; names kernel, grid and arguments
└── DeviceLostError          a sticky error (illegal address, assert, ...): only a new process helps
"""

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from nightmill.jobs.errors import RunnerError
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.features import features_of, too_old
from nightmill.worker.runners.gpu.device.known_cards import KnownCard
from nightmill.worker.runners.gpu.device.peaks import Peaks, peaks_of
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.device.waits import StuckWaits
from nightmill.worker.runners.kv_format import KvFormat

log = logging.getLogger(__name__)

# What the driver says once the context is beyond repair (CUDA 13.0, cuda.h: errors 700 to 720, 214, 220).
_STICKY = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "timed out and was terminated",
    "uncorrectable",
    "context is destroyed",
)


class CudaError(RunnerError):
    """The GPU or its driver refused something."""


class NoDeviceError(CudaError):
    """There is no usable GPU."""


class DeviceMemoryError(CudaError):
    """The GPU's memory does not suffice."""


class KernelLaunchError(CudaError):
    """A kernel could not be launched."""


class DeviceLostError(CudaError):
    """The GPU reported an error after which its context is of no use: this process has to end."""


class Device:
    """A GPU in use by the thread that made it; a context manager.

    element    what its kernels are compiled for: the type of weights and activations ...
    kv         ... and how keys and values are kept
    pretended  the card that it is taken for: features, sizes and peaks are that one's, and its name says both

    Raises NoDeviceError where there is no driver, no GPU of that index, one that is too old, or one that
    cannot be taken for the other.
    """

    def __init__(
        self, index: int = 0, element: Element = Element.F16, kv: KvFormat = KvFormat.ELEMENT, *,
        pretended: KnownCard | None = None,
    ) -> None:  # fmt: skip
        cuda = cuda_driver()
        self._cuda = cuda
        self._closed = False
        self._lost = False
        self._thread = threading.get_ident()
        self._allocations: dict[int, Any] = {}
        self._unloads: list[Callable[[], None]] = []
        self._kept: list[Any] = []
        self.cubins: dict[Source, bytes] = {}
        """Machine code of kernel files that is at hand, for `Module.of`."""
        self.stuck_waits = StuckWaits(self.pinned)
        try:
            cuda.init()
            found = cuda.Device.count()
            if not 0 <= index < found:
                raise NoDeviceError(f"there is no GPU {index}; this machine has {found}, counted from 0")
            handle = cuda.Device(index)
            check_card(index, handle, pretended)
            self._context = handle.retain_primary_context()
            self._context.push()
        except cuda.Error as error:
            raise NoDeviceError(f"GPU {index} cannot be used: {error}") from error
        try:
            self.index = index
            self._handle = handle
            self.element = element
            self.kv = kv
            self.pretended = pretended
            self.name: str = handle.name()
            self.compute_capability: tuple[int, int] = handle.compute_capability()
            self.features = features_of(self.compute_capability)
            self.multiprocessors: int = handle.get_attribute(cuda.device_attribute.MULTIPROCESSOR_COUNT)
            self.total_memory: int = handle.total_memory()
            self.driver_version: int = cuda.get_driver_version()
            self._taken_before = 0  # bytes of the memory that are not to be had, beside what is allocated
            if pretended is not None:
                self._pretend(pretended)
            self.stream = cuda.Stream()
        except cuda.Error as error:
            self._context.pop()
            self._context.detach()
            raise self.named(error, f"taking GPU {index} into use") from error
        atexit.register(self.close)

    def _pretend(self, card: KnownCard) -> None:
        """Take it for another card, as far as it can be."""
        self.features = features_of(card.capability, self.compute_capability)
        self.compute_capability = card.capability
        code = self.features.target.partition("/")[0]
        self.name = f"{card.name} (pretended on {self.name}, code of {code})"
        self.multiprocessors = card.multiprocessors
        self._taken_before = max(0, int(self._cuda.mem_get_info()[0]) - card.free)
        self.total_memory = min(self.total_memory, card.memory << 30)

    @property
    def architecture(self) -> str:
        """Architecture to compile for, as `compile_kernels` takes it."""
        return self.features.target

    @property
    def hopper(self) -> bool:
        """True if kernels for Hopper run on it; other GPUs have no wgmma."""
        return self.features.hopper

    @property
    def fp8(self) -> bool:
        """True if its tensor cores multiply FP8."""
        return self.features.fp8

    @property
    def block_shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        return self.features.block_shared

    @property
    def stream_handle(self) -> int:
        """The stream as the integer that other CUDA libraries take."""
        return int(self.stream.handle)

    def peaks(self) -> Peaks:
        """Peak rates of its memory and tensor cores."""
        if self.pretended is not None:
            return self.pretended.peaks
        ask, names = self._handle.get_attribute, self._cuda.device_attribute
        with self.errors("asking what the GPU is built for"):
            return peaks_of(
                self.compute_capability,
                self.multiprocessors,
                clock_khz=ask(names.CLOCK_RATE),
                memory_khz=ask(names.MEMORY_CLOCK_RATE),
                bus_bits=ask(names.GLOBAL_MEMORY_BUS_WIDTH),
                name=self.name,
            )

    def free_memory(self) -> int:
        """Bytes of device memory free now."""
        with self.errors("asking for free memory"):
            return max(0, int(self._cuda.mem_get_info()[0]) - self._taken_before)

    def allocate(self, size: int, purpose: str = "a buffer") -> int:
        """Take `size` bytes of device memory; returns its address. Raises DeviceMemoryError."""
        try:
            if self._taken_before and size > self.free_memory():
                raise self._full(size, purpose)
            allocation = self._cuda.mem_alloc(max(size, 1))
        except self._cuda.MemoryError as error:
            raise self._full(size, purpose) from error
        except self._cuda.Error as error:
            raise self.named(error, f"allocating {size:,} bytes for {purpose}") from error
        address = int(allocation)
        self._allocations[address] = allocation
        return address

    def _full(self, size: int, purpose: str) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"the GPU has no {size:,} bytes left for {purpose}; {self.free_memory():,} of "
            f"{self.total_memory:,} are free"
        )

    def free(self, address: int) -> None:
        """Give back what `allocate` returned."""
        with self.errors("freeing memory"):
            self._allocations.pop(address).free()

    def upload(self, array: npt.NDArray[Any], purpose: str = "an array") -> int:
        """Copy an array into new device memory; waits. Returns its address."""
        array = np.ascontiguousarray(array)
        address = self.allocate(array.nbytes, purpose)
        if array.nbytes:
            with self.errors(f"uploading {purpose}"):
                self._cuda.memcpy_htod(address, array)
        return address

    def download(self, address: int, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Copy device memory into a new array once the stream is done with what was queued."""
        array = np.empty(shape, dtype=dtype)
        self.synchronize()
        if array.nbytes:
            with self.errors("downloading"):
                self._cuda.memcpy_dtoh(array, address)
        return array

    def pinned(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A host array that the GPU can copy from and to while the host goes on. Zeroed."""
        with self.errors("allocating pinned host memory"):
            array: npt.NDArray[Any] = self._cuda.pagelocked_zeros(shape, dtype)
        return array

    def copy_in(self, address: int, array: npt.NDArray[Any]) -> None:
        """Queue a copy of a pinned array to the device; it must not change until that is done."""
        try:
            self._cuda.memcpy_htod_async(address, array, self.stream)
        except self._cuda.Error as error:
            raise self.named(error, f"copying {array.nbytes:,} bytes to the GPU") from error

    def copy_out(self, array: npt.NDArray[Any], address: int) -> None:
        """Queue a copy of device memory into a pinned array."""
        try:
            self._cuda.memcpy_dtoh_async(array, address, self.stream)
        except self._cuda.Error as error:
            raise self.named(error, f"copying {array.nbytes:,} bytes from the GPU") from error

    def copy_rows_in(self, address: int, pitch: int, array: npt.NDArray[Any], width: int) -> None:
        """Queue a copy of the first `width` bytes of each row of a pinned 2-D array to rows `pitch` apart."""
        copy = self._cuda.Memcpy2D()
        copy.set_src_host(array)
        copy.src_pitch = array.strides[0]
        copy.set_dst_device(address)
        copy.dst_pitch = pitch
        copy.width_in_bytes = width
        copy.height = len(array)
        with self.errors("copying rows to the GPU"):
            copy(self.stream)

    def fill(self, address: int, value: int, size: int) -> None:
        """Queue setting `size` bytes to `value`."""
        if size:
            with self.errors("filling memory"):
                self._cuda.memset_d8_async(address, value, size, self.stream)

    def event(self, *, timing: bool = False) -> Any:
        """An event; without timing it is cheaper to record, and waiting for it does not spin."""
        flags = self._cuda.event_flags
        with self.errors("making an event"):
            event = self._cuda.Event(flags.DEFAULT if timing else flags.DISABLE_TIMING)
        self._kept.append(event)
        return event

    def wait(self, event: Any, what: str = "a step") -> None:
        """Block the host until `event` is reached."""
        with self.errors(f"waiting for {what}"):
            event.synchronize()

    def synchronize(self) -> None:
        """Block the host until all that was queued on the stream is done."""
        with self.errors("waiting for the GPU"):
            self.stream.synchronize()

    def at_close(self, unload: Callable[[], None]) -> None:
        """Have something that lives in the context let go of before the context is, unless it is lost."""
        self._unloads.append(unload)

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Turn the driver's errors into CudaError, saying what was being done."""
        try:
            yield
        except self._cuda.Error as error:
            raise self.named(error, doing) from error

    def named(self, error: Exception, doing: str) -> CudaError:
        text = str(error)
        if self._lost or any(phrase in text.lower() for phrase in _STICKY):
            self._lost = True
            stuck = self.stuck_waits.found()
            return DeviceLostError(
                f"the GPU failed while {doing}: {text}{stuck and ': '}{stuck}. "
                "The context is lost: this process must end"
            )
        return CudaError(f"the GPU failed while {doing}: {text}")

    @property
    def lost(self) -> bool:
        """True after an error that only a new process cures."""
        return self._lost

    def close(self) -> None:
        """Free everything and let go of the context. Safe to call twice; only the owning thread can."""
        if self._closed or threading.get_ident() != self._thread:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            if not self._lost:
                self.stream.synchronize()
                for unload in self._unloads:
                    unload()
        except self._cuda.Error as error:
            log.warning("the GPU failed while it was being let go: %s", error)
        self._kept.clear()
        self._unloads.clear()
        for allocation in self._allocations.values():
            try:
                allocation.free()
            except self._cuda.Error:
                break  # a lost context: the driver frees it with the process
        self._allocations.clear()
        del self.stream
        self._context.pop()
        self._context.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def import_packages() -> bool:
    """Import the packages that a runner drives a GPU by; False if one is missing. No GPU is used."""
    names = ("pycuda.driver", "cuda.bindings.driver", "nvmath.bindings.cublas", "nvmath.bindings.cublasLt")
    try:
        for name in names:
            import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # whoever needs them says what is missing
        log.debug("there is no runner for GPUs: %s", error)
        return False
    return True


def device_count() -> int:
    """Return how many GPUs PyCUDA can use; 0 if it or the driver is missing, or shows none."""
    try:
        cuda = cuda_driver()
    except NoDeviceError:
        return 0
    try:
        cuda.init()  # an error where the driver shows no GPU, as with an empty CUDA_VISIBLE_DEVICES
        return int(cuda.Device.count())
    except cuda.Error:
        return 0


def check_card(index: int, handle: Any, pretended: KnownCard | None) -> None:
    """Raise NoDeviceError if the GPU is too old, or cannot be taken for the other card."""
    capability = handle.compute_capability()
    if (reason := too_old(f"GPU {index} ({handle.name()})", capability)) is not None:
        raise NoDeviceError(reason)
    if pretended is not None and pretended.features.hopper and not features_of(capability).hopper:
        raise NoDeviceError(
            f"GPU {index} ({handle.name()}) cannot be taken for {pretended.name}, whose kernels run on "
            "Hopper alone: name another card in NIGHTMILL_PRETEND_DEVICE, or none"
        )


def cuda_driver() -> Any:
    """Import PyCUDA's driver. Raises NoDeviceError."""
    try:
        import pycuda.driver
    except ImportError as error:
        raise NoDeviceError(
            f"PyCUDA cannot be imported ({error}): install `nightmill[cuda]` where the CUDA toolkit and an "
            "NVIDIA driver are; `--reference` generates without a GPU"
        ) from error
    return pycuda.driver
