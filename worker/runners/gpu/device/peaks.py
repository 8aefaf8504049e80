"""Peak rates of a GPU: bytes of its memory and FLOPs of its tensor cores, a second."""

from dataclasses import dataclass

__all__ = ["Peaks", "peaks_of"]

# Of 16-bit products with sums in float, a clock and multiprocessor, by compute capability: data sheets of
# A100, H100, B200, and of L4, L40S and RTX PRO cards. GeForce cards with the chips of those have half.
_FLOPS_A_CLOCK = {
    (8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (8, 6): 1024, (8, 9): 1024, (12, 0): 1024,
}  # fmt: skip
_GEFORCE_FLOPS_A_CLOCK = 512


@dataclass(frozen=True, slots=True)
class Peaks:
    """A second's worth; products are of 16-bit numbers."""

    bytes: float
    flops: float


def peaks_of(
    capability: tuple[int, int], multiprocessors: int, *, clock_khz: int, memory_khz: int, bus_bits: int,
    name: str = "",
) -> Peaks:  # fmt: skip
    """Compute the peaks from the driver's attributes and name; memory moves twice the bus in a clock."""
    each = _FLOPS_A_CLOCK.get(capability, _GEFORCE_FLOPS_A_CLOCK)
    if "GeForce" in name:
        each = _GEFORCE_FLOPS_A_CLOCK
    flops = each * multiprocessors * clock_khz * 1e3
    return Peaks(2 * memory_khz * 1e3 * bus_bits / 8, flops)
