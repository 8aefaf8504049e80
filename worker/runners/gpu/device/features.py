"""The features of a GPU, by its compute capability: the one place where code asks for them.

Launchers ask `Device.features`. A GPU may be taken for another one (`known_cards`): then its features are
those of the other, as far as code for that one runs on it.
"""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["OLDEST", "Capability", "Features", "features_of", "too_old"]

Capability = tuple[int, int]
"""A compute capability, as (9, 0)."""

OLDEST: Capability = (8, 0)
"""Ampere, the first with BF16, asynchronous copies to shared memory and `mma.m16n8k16`, which kernels use."""

_HOPPER: Capability = (9, 0)
_FIRST_DEPENDENT, _FIRST_FP8 = (9, 0), (8, 9)
_LAST_BEFORE_HOPPER: Capability = (8, 9)


class _Room(NamedTuple):
    """Limits of a multiprocessor: KiB of shared memory for a block and for all, threads, blocks at once."""

    block: int
    shared: int
    threads: int
    blocks: int


# CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability".
_ROOM = {
    (8, 0): _Room(163, 164, 2048, 32),
    (8, 7): _Room(163, 164, 1536, 16),
    (8, 6): _Room(99, 100, 1536, 16),
    (8, 9): _Room(99, 100, 1536, 24),
    (9, 0): _Room(227, 228, 2048, 32),
    (10, 0): _Room(227, 228, 2048, 32),
    (10, 3): _Room(227, 228, 2048, 32),
    (11, 0): _Room(227, 228, 1536, 24),
    (12, 0): _Room(99, 100, 1536, 24),
    (12, 1): _Room(99, 100, 1536, 24),
}
_LEAST_ROOM = _Room(99, 100, 1536, 16)
_RESERVED = 1 << 10  # bytes of a multiprocessor's shared memory that each block takes beside its own


@dataclass(frozen=True, slots=True)
class Features:
    """The features and sizes of a GPU that kernels may use.

    target        what nvcc compiles for: "sm_90a"; or "compute_86/sm_90", code for compute capability 8.6
                  made into instructions of 9.0
    hopper        kernels for Hopper run: wgmma, bulk tensor copies, clusters
    dependent     a kernel may start while the one ahead of it still runs
    fp8           tensor cores multiply FP8
    block_shared  bytes of shared memory that a block may have
    shared        bytes that the blocks of a multiprocessor share
    threads, blocks  of a multiprocessor at once
    """

    target: str
    hopper: bool
    dependent: bool
    fp8: bool
    block_shared: int
    shared: int
    threads: int
    blocks: int

    def blocks_held(self, threads: int, shared: int) -> int:
        """Blocks of these sizes that a multiprocessor has room for, registers aside."""
        return min(self.shared // (shared + _RESERVED), self.threads // threads, self.blocks)


def features_of(capability: Capability, on: Capability | None = None) -> Features:
    """Return the features of a GPU; `on`: the compute capability of the one that it is pretended on.

    Code of one architecture runs on later ones. That of a later one does not run on an earlier: there, and
    where only dependent launch is between the two, the newest before Hopper stands for it.
    """
    on = on or capability
    code = capability
    if capability != on and (capability > on or capability >= _HOPPER):
        code = min(_LAST_BEFORE_HOPPER, on)
    exact = f"sm_{on[0]}{on[1]}"
    hopper = code == on == _HOPPER
    room = _ROOM.get(capability, _LEAST_ROOM)
    return Features(
        target=exact + "a" * hopper if code == on else f"compute_{code[0]}{code[1]}/{exact}",
        hopper=hopper,
        dependent=code >= _FIRST_DEPENDENT,
        fp8=code >= _FIRST_FP8,
        block_shared=room.block << 10,
        shared=room.shared << 10,
        threads=room.threads,
        blocks=room.blocks,
    )


def too_old(name: str, capability: Capability) -> str | None:
    """Say why a GPU cannot be used, if it is older than Ampere."""
    if capability >= OLDEST:
        return None
    major, minor = capability
    return (
        f"{name} has compute capability {major}.{minor}; the kernels need 8.0 or newer (Ampere: A100, RTX "
        "30-series and later; Volta and Turing are too old): take another GPU, or generate with --reference"
    )
