"""A GPU as others speak of it: by its index, or by its name and what kernels may use of it."""

from dataclasses import dataclass
from typing import Protocol

from nightmill.worker.runners.gpu.device.device import NoDeviceError, check_card, cuda_driver
from nightmill.worker.runners.gpu.device.known_cards import KnownCard

__all__ = ["FIRST_GPU", "ChosenGpu", "NamedGpu", "describe_device"]


@dataclass(frozen=True, slots=True)
class ChosenGpu:
    """The index of a GPU, and the card that it is taken for, if not for itself."""

    index: int = 0
    pretended: KnownCard | None = None


FIRST_GPU = ChosenGpu()


class NamedGpu(Protocol):
    """A GPU by its name, and what kernels may use of it (`Features`)."""

    @property
    def name(self) -> str: ...
    @property
    def hopper(self) -> bool: ...
    @property
    def fp8(self) -> bool: ...
    @property
    def block_shared(self) -> int: ...


def describe_device(index: int = 0) -> str:
    """Architecture and versions, for a person; makes no context.

    Raises NoDeviceError, also for a GPU that is too old.
    """
    cuda = cuda_driver()
    try:
        cuda.init()
        handle = cuda.Device(index)
        check_card(index, handle, None)
        major, minor = handle.compute_capability()
    except cuda.Error as error:
        raise NoDeviceError(f"GPU {index} cannot be used: {error}") from error
    driver = cuda.get_driver_version()
    return f"compute capability {major}.{minor}, driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
