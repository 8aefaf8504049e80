"""Peak rates of a GPU: bytes of its memory and FLOPs of its tensor cores, a second."""

from dataclasses import dataclass

__all__ = ["Peaks", "peaks_of"]

# Of 16-bit products with sums in float, a clock and multiprocessor, by compute capability: data sheets of
# A100, H100 and B200. Those of GeForce and of smaller cards have a fraction of it.
_FLOPS_A_CLOCK = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
_USUAL_FLOPS_A_CLOCK = 512


@dataclass(frozen=True, slots=True)
class Peaks:
    """A second's worth; products are of 16-bit numbers."""

    bytes: float
    flops: float


def peaks_of(
    capability: tuple[int, int], multiprocessors: int, *, clock_khz: int, memory_khz: int, bus_bits: int
) -> Peaks:
    """Compute the peaks from the driver's attributes; memory moves twice the bus in a clock."""
    flops = _FLOPS_A_CLOCK.get(capability, _USUAL_FLOPS_A_CLOCK) * multiprocessors * clock_khz * 1e3
    return Peaks(2 * memory_khz * 1e3 * bus_bits / 8, flops)
