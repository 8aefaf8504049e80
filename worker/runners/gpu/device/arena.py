"""Memory of a GPU that is planned as a whole and given out in pieces."""

from nightmill.worker.runners.gpu.device.device import Device, DeviceMemoryError

__all__ = ["Arena", "aligned"]

_ALIGNMENT = 256


class Arena:
    """One allocation, given out from `base` on in pieces of 256-byte alignment; nothing is given back."""

    def __init__(self, device: Device, size: int, purpose: str) -> None:
        self.size = size
        self.used = 0
        self._purpose = purpose
        self.base = device.allocate(size, purpose)

    def take(self, size: int) -> int:
        """The address of `size` bytes. Raises DeviceMemoryError where the arena was planned too small."""
        start = self.used
        self.used = start + aligned(size)
        if self.used > self.size:
            raise DeviceMemoryError(
                f"the memory for {self._purpose} was planned too small: {self.used:,} of {self.size:,} bytes"
            )
        return self.base + start


def aligned(size: int) -> int:
    """`size` rounded up to what an arena gives out."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
