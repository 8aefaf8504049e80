"""The choice of attention kernels: for each kind of layer the first launchers that suit it."""

from collections.abc import Iterator

from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.hopper_wide import HopperWide
from nightmill.worker.runners.gpu.attention.latent import latent_decode, latent_prefill
from nightmill.worker.runners.gpu.attention.plans import AttentionPlans, Decode, Prefill
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.attention.scores import score_arguments
from nightmill.worker.runners.gpu.attention.wide import WideDecode, WidePrefill, has_room
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["Attentions", "attention_workspace", "by_heads", "decode_attention", "prefill_attention"]


class Attentions:
    """The launchers for all layers of a model.

    max_context  tokens that a sequence may have

    A step has one set of pieces and tiles for all layers with equal heads, with a window or without: a plan,
    made by the launchers for the first of them.
    """

    def __init__(self, device: Device, spec: ModelSpec, *, max_context: int) -> None:
        self._known: dict[object, tuple[Decode, Prefill, int]] = {}
        planners: list[tuple[Decode, Prefill]] = []
        for latent in spec.latents:
            if _kind(latent) not in self._known:
                decode: Decode = latent_decode(device, latent, max_context=max_context)
                prefill: Prefill = latent_prefill(device, latent)
                planners = planners or [(decode, prefill)]
                self._known[_kind(latent)] = decode, prefill, 0
        for alike in by_heads(spec):
            plain, number = all(map(WideDecode.suits, alike)), len(planners)
            beside: tuple[Decode | None, Prefill | None] = None, None
            for one in alike:
                if _kind(one) not in self._known:
                    decode = decode_attention(
                        device, one, max_context=max_context, beside=beside[0], wide=plain
                    )
                    prefill = prefill_attention(device, one, beside[1], wide=plain)
                    if beside == (None, None):
                        planners.append((decode, prefill))
                    beside = decode, prefill
                    self._known[_kind(one)] = decode, prefill, number
        self.plans = AttentionPlans(planners, [decode for decode, _, _ in self._known.values()])

    def of(self, attention: Attention | LatentAttention) -> tuple[Decode, Prefill, int]:
        """Return the launchers for the drawn tokens, and for the prompts, of such a layer, and its plan."""
        return self._known[_kind(attention)]


def by_heads(spec: ModelSpec) -> Iterator[list[Attention]]:
    """The different kinds of attention of a model, those with equal heads together."""
    found: dict[tuple[int, int, int], list[Attention]] = {}
    for one in spec.attentions:
        found.setdefault((one.heads, one.kv_heads, one.head_dim), []).append(one)
    yield from found.values()


def attention_workspace(
    spec: ModelSpec, kv: KvFormat, *, hopper: bool, multiprocessors: int, slots: int, max_context: int,
    max_tokens: int,
) -> int:  # fmt: skip
    """Device memory that the launchers of a model's attention keep, but for that of latents."""
    needed = 0
    for first, *_ in by_heads(spec):
        if DecodeAttention.suits(first):
            needed += DecodeAttention.workspace(
                first, max_context=max_context, multiprocessors=multiprocessors
            )
        elif WideDecode.suits(first) and kv is KvFormat.ELEMENT:
            needed += WideDecode.workspace(first)
        if HopperPrefill.suits(first, hopper=hopper):
            sizes = {"slots": slots, "max_context": max_context, "max_tokens": max_tokens}
            needed += HopperPrefill.reserved(first, kv, **sizes)
    return needed


def _kind(attention: Attention | LatentAttention) -> tuple[object, ...]:
    """Return the parameters in which layers differ for attention's kernels."""
    if isinstance(attention, LatentAttention):
        return (attention.scale,)
    heads = attention.heads, attention.kv_heads, attention.head_dim
    return heads, score_arguments(attention), attention.sinks, attention.causal


def decode_attention(
    device: Device, attention: Attention, *, max_context: int, beside: Decode | None = None, wide: bool = True
) -> Decode:
    """Choose the launcher of attention for drawn tokens.

    max_context  tokens that a sequence may have
    beside       for other layers of the model with equal heads
    wide         all these suit `WideDecode`, whose pieces and tiles serve no other launcher
    """
    if DecodeAttention.suits(attention):
        other = beside if isinstance(beside, DecodeAttention) else None
        return DecodeAttention(device, attention, max_context=max_context, beside=other)
    if wide and WideDecode.suits(attention) and WideDecode.fits(device):
        same = beside if isinstance(beside, WideDecode) else None
        return WideDecode(device, attention, max_context=max_context, beside=same)
    return GeneralDecode(device, attention)


def prefill_attention(
    device: Device, attention: Attention, beside: Prefill | None = None, *, wide: bool = True
) -> Prefill:
    """Choose the launcher of attention for chunks of prompts; arguments as for `decode_attention`."""
    if HopperPrefill.suits(attention, hopper=device.hopper):
        return HopperPrefill(device, attention, beside if isinstance(beside, HopperPrefill) else None)
    if wide and HopperWide.suits(attention, hopper=device.hopper) and has_room(device):
        return HopperWide(device, attention)
    if wide and WideDecode.suits(attention) and WideDecode.fits(device):
        return WidePrefill(device, attention)
    return PortablePrefill(device, attention)
