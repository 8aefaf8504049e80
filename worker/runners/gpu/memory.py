"""Decides what goes where in the GPU's memory, before anything is loaded: weights, workspace, KV pages."""

from collections.abc import Callable
from dataclasses import dataclass

from nightmill.worker.runners.gpu.device.device import DeviceMemoryError
from nightmill.worker.runners.gpu.kv_cache import PAGE

__all__ = ["LEAST_TOKENS", "MemoryPlan", "allowed", "plan_memory", "tokens_of_a_step"]

LEAST_TOKENS = 2048
"""Of a step that has not to have fewer."""
_LEAST_PAGES = 16
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. `free` was free before, `budget` of it may be used."""

    weights: int
    workspace: int
    cache: int
    kv_blocks: int
    budget: int
    free: int

    def __str__(self) -> str:
        rest = self.free - self.weights - self.workspace - self.cache
        parts = {
            "weights": self.weights,
            "workspace": self.workspace,
            f"KV cache of {self.kv_blocks:,} pages": self.cache,
            "left free": rest,
        }
        return ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in parts.items())


def allowed(free: int, gpu_memory: float) -> int:
    """Bytes that may be used of `free`: such a share, or, where it is an int, so many."""
    return min(gpu_memory, free) if isinstance(gpu_memory, int) else int(free * gpu_memory)


def tokens_of_a_step(most: int, least: int, workspace: Callable[[int], int], room: int) -> int:
    """How many tokens a step may have: `most`, or fewer where memory is short.

    It is halved, but not below `least`, while the workspace of such steps takes more than a quarter of
    `room`, which is what the weights leave. Texts are the same to the bit: prompts come in more pieces.
    """
    tokens = most
    while tokens // 2 >= least and workspace(tokens) > room // 4:
        tokens //= 2
    return tokens


def plan_memory(
    *,
    weights: int,
    page: int,
    free: int,
    gpu_memory: float,
    slots: int,
    context: int,
    max_tokens: int,
    workspace: int,
    kv_blocks: int | None = None,
) -> MemoryPlan:
    """Plan for what `gpu_memory` (a share, or bytes) allows of `free` bytes.

    weights    bytes that they take (`weight_bytes`)
    page       bytes of a page of the KV cache (`page_bytes`)
    context    tokens that a sequence may have; more pages than all slots can fill are not taken
    workspace  bytes of activations, of what kernels ask for, and of per-slot state
    kv_blocks  pages to take; None: as many as fit

    Raises DeviceMemoryError, with the numbers and the settings to change, where that cannot fit.
    """
    budget = allowed(free, gpu_memory)
    room = (budget - weights - workspace) // page - 1  # one page more is kept for padding
    wanted = slots * -(-context // PAGE) if kv_blocks is None else kv_blocks
    least = min(wanted, _LEAST_PAGES) if kv_blocks is None else kv_blocks
    if room < least:
        raise DeviceMemoryError(
            f"the model does not fit: weights {weights:,} bytes, workspace {workspace:,} (for steps of "
            f"{max_tokens:,} tokens), at least {least} KV pages of {page:,}; {free:,} bytes are free, of "
            f"which --gpu-memory {gpu_memory:,} allows {budget:,}. Lower --max-sequences or --context, raise "
            "--gpu-memory, or end what else runs on this GPU"
        )
    blocks = min(wanted, room)
    return MemoryPlan(weights, workspace, (blocks + 1) * page, blocks, budget, free)
