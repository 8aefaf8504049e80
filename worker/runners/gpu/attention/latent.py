"""Latent attention: one head of keys, which are values too, for all heads of queries."""

from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.hopper_wide import HopperWide
from nightmill.worker.runners.gpu.attention.latent_rows import row_sources
from nightmill.worker.runners.gpu.attention.prefill import PortablePrefill
from nightmill.worker.runners.gpu.attention.scores import scoring
from nightmill.worker.runners.gpu.attention.tiles import TILE_ROWS
from nightmill.worker.runners.gpu.attention.wide import VALUES, WideDecode, WidePrefill
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.sources import Source

__all__ = ["LatentKernels", "as_attention", "latent_decode", "latent_kernels", "latent_prefill"]

_STEP = 64  # elements of a key, in multiples of which the fast kernels take them


class LatentKernels:
    """All kernels that layers of latent attention have of their own, as `Launcher` says."""

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source for one in spec.latents for source in latent_kernels(one, hopper=hopper)]

    @staticmethod
    def workspace(attention: LatentAttention) -> int:
        """Bytes of device memory that they take."""
        return WideDecode.workspace(as_attention(attention)) if _is_fast(attention) else 0

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the part of a model that no kernel takes, or None."""
        if spec.latents and spec.attentions:
            return "layers of latent attention beside layers of other attention"
        for one in spec.latents:
            sizes = one.key_dim, one.rope.dim, one.value_dim, one.latent, one.query_latent or 0
            if any(size % 4 for size in sizes) or one.head_dim % 8 or one.latent % 8 or one.kept > 576:
                return f"latent attention of sizes {', '.join(map(str, sizes))} (multiples of 8, 576 kept)"
            if one.key_dim % 8 or one.heads * one.value_dim % 8 or (one.query_latent or 0) % 8:
                return f"latent attention of sizes {', '.join(map(str, sizes))} (multiples of 8)"
            if one.heads > TILE_ROWS:
                return f"latent attention of {one.heads} heads (at most {TILE_ROWS})"
            if one.norm.centred or one.norm.bias:
                return "latents with other norms than RMS norms"
        return None


def latent_kernels(attention: LatentAttention, *, hopper: bool) -> list[Source]:
    """List the kernel files for layers of latent attention."""
    same = as_attention(attention), attention.latent
    if not _is_fast(attention):
        return [*row_sources(), scoring("attention_any", *same)]
    of_prompts = [HopperWide.source(*same)] if HopperWide.suits(*same, hopper=hopper) else []
    return [*row_sources(), scoring("wide_attention", *same), *of_prompts]


def as_attention(attention: LatentAttention) -> Attention:
    """Latent attention as attention over one head of keys, whose values are the first elements of these."""
    return Attention(
        heads=attention.heads, kv_heads=1, head_dim=attention.kept, rope=attention.rope,
        scale=attention.scale,
    )  # fmt: skip


def latent_decode(
    device: Device, attention: LatentAttention, *, max_context: int
) -> WideDecode | GeneralDecode:
    """Choose the launcher for drawn tokens; max_context: tokens that a sequence may have."""
    same = as_attention(attention)
    if _is_fast(attention):
        return WideDecode(device, same, attention.latent, max_context=max_context)
    return GeneralDecode(device, same, attention.latent)


def latent_prefill(device: Device, attention: LatentAttention) -> HopperWide | WidePrefill | PortablePrefill:
    """Choose the launcher for chunks of prompts."""
    same = as_attention(attention), attention.latent
    if HopperWide.suits(*same, hopper=device.hopper):
        return HopperWide(device, *same)
    return (WidePrefill if _is_fast(attention) else PortablePrefill)(device, *same)


def _is_fast(attention: LatentAttention) -> bool:
    return attention.latent == VALUES and attention.kept % _STEP == 0
