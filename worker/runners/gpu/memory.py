"""Decides what goes where in the GPU's memory, before anything is loaded: weights, workspace, KV pages."""

from dataclasses import dataclass

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import DeviceMemoryError, aligned
from nightmill.worker.runners.gpu.gemm import padded_rows
from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
from nightmill.worker.runners.gpu.library import WORKSPACE_BYTES
from nightmill.worker.runners.gpu.weights import padded_vocab, weight_bytes

__all__ = ["LOGIT_ROWS", "MemoryPlan", "plan_memory", "workspace_pieces"]

LOGIT_ROWS = 512  # rows of logits computed and sampled at once
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


def workspace_pieces(spec: ModelSpec, *, max_tokens: int, max_draws: int) -> dict[str, int]:
    """Bytes of each activation for steps of up to `max_tokens` tokens, of which `max_draws` may draw."""
    tokens = padded_rows(max_tokens)
    draws = padded_rows(max_draws)
    attention, ffn = spec.layers[0].attention, spec.layers[0].feed_forward.width
    return {
        "resolved": 4 * tokens,  # token ids
        "x": 4 * tokens * spec.width,  # the residual stream, float
        "normed": 2 * tokens * spec.width,
        "qkv": 2 * tokens * attention.qkv,
        "mixed": 2 * tokens * attention.queries,
        "gate_up": 2 * tokens * 2 * ffn,
        "activated": 2 * tokens * ffn,
        "drawing": 4 * draws * spec.width,  # of the residual stream, the rows that draw
        "logits": 4 * padded_rows(min(draws, LOGIT_ROWS)) * padded_vocab(spec),
        "drawn": 4 * draws,
    }


def plan_memory(
    spec: ModelSpec,
    *,
    free: int,
    gpu_memory: float,
    slots: int,
    context: int,
    max_tokens: int,
    max_draws: int,
    kv_blocks: int | None = None,
    extra: int = 0,
) -> MemoryPlan:
    """Plan for `gpu_memory` (a share) of `free` bytes.

    context    tokens that a sequence may have; more pages than all slots can fill are not taken
    kv_blocks  pages to take; None: as many as fit
    extra      bytes of workspace that the kernels ask for, and of per-slot state

    Raises DeviceMemoryError, with the numbers and the settings to change, where that cannot fit.
    """
    weights = weight_bytes(spec)
    pieces = workspace_pieces(spec, max_tokens=max_tokens, max_draws=max_draws)
    workspace = sum(aligned(size) for size in pieces.values()) + WORKSPACE_BYTES + extra
    page = page_bytes(spec)
    budget = int(free * gpu_memory)
    room = (budget - weights - workspace) // page - 1  # one page more is kept for padding
    wanted = kv_blocks or slots * -(-context // PAGE)
    least = min(wanted, _LEAST_PAGES) if kv_blocks is None else kv_blocks
    if room < least:
        raise DeviceMemoryError(
            f"the model does not fit: weights {weights:,} bytes, workspace {workspace:,} (for steps of "
            f"{max_tokens:,} tokens), at least {least} KV pages of {page:,}; {free:,} bytes are free, of "
            f"which --gpu-memory {gpu_memory:g} allows {budget:,}. Lower --max-sequences or --context, raise "
            "--gpu-memory, or end what else runs on this GPU"
        )
    blocks = min(wanted, room)
    return MemoryPlan(weights, workspace, (blocks + 1) * page, blocks, budget, free)
