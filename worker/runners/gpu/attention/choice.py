"""The choice of attention kernels: for each kind of layer the first launchers that suit it."""

from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.hopper_wide import HopperWide
from nightmill.worker.runners.gpu.attention.latent import latent_decode, latent_prefill
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.attention.scores import score_arguments
from nightmill.worker.runners.gpu.attention.wide import WideDecode, WidePrefill, has_room
from nightmill.worker.runners.gpu.device.device import Device

__all__ = ["Attentions", "Decode", "Prefill", "decode_attention", "prefill_attention"]

Decode = DecodeAttention | GeneralDecode | WideDecode
Prefill = HopperPrefill | PortablePrefill | WidePrefill | HopperWide


class Attentions:
    """The launchers for all layers of a model, which have equal heads.

    max_context  tokens that a sequence may have

    A step has one set of pieces and tiles, for layers with and without a window: `decode` and `prefill`, the
    launchers for the first layer, make them.
    """

    def __init__(self, device: Device, spec: ModelSpec, *, max_context: int) -> None:
        self._known: dict[object, tuple[Decode, Prefill]] = {}
        plain = all(map(WideDecode.suits, spec.attentions))
        decode: Decode | None = None
        prefill: Prefill | None = None
        for latent in spec.latents:
            if _kind(latent) not in self._known:
                decode = latent_decode(device, latent, max_context=max_context)
                self._known[_kind(latent)] = decode, latent_prefill(device, latent)
        for one in spec.attentions:
            if _kind(one) not in self._known:
                decode = decode_attention(device, one, max_context=max_context, beside=decode, wide=plain)
                prefill = prefill_attention(device, one, prefill, wide=plain)
                self._known[_kind(one)] = decode, prefill
        self.decode, self.prefill = next(iter(self._known.values()))

    def of(self, attention: Attention | LatentAttention) -> tuple[Decode, Prefill]:
        """Return the launchers for the drawn tokens, and for the prompts, of such a layer."""
        return self._known[_kind(attention)]


def _kind(attention: Attention | LatentAttention) -> tuple[object, ...]:
    """Return the parameters in which layers with equal heads differ."""
    if isinstance(attention, LatentAttention):
        return (attention.scale,)
    return score_arguments(attention), attention.sinks


def decode_attention(
    device: Device, attention: Attention, *, max_context: int, beside: Decode | None = None, wide: bool = True
) -> Decode:
    """Choose the launcher of attention for drawn tokens.

    max_context  tokens that a sequence may have
    beside       for other layers of the model
    wide         all layers suit `WideDecode`, whose pieces and tiles serve no other launcher
    """
    if DecodeAttention.suits(attention):
        other = beside if isinstance(beside, DecodeAttention) else None
        return DecodeAttention(device, attention, max_context=max_context, beside=other)
    if wide and WideDecode.suits(attention) and has_room(device):
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
    if wide and WideDecode.suits(attention) and has_room(device):
        return WidePrefill(device, attention)
    return PortablePrefill(device, attention)
