"""The choice of attention kernels: for each kind of layer the first launchers that suit it."""

from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.latent import (
    LatentDecode,
    LatentPrefill,
    latent_decode,
    latent_prefill,
)
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.attention.scores import score_arguments
from nightmill.worker.runners.gpu.device.device import Device

__all__ = ["Attentions", "Decode", "Prefill", "decode_attention", "prefill_attention"]

Decode = DecodeAttention | GeneralDecode | LatentDecode
Prefill = HopperPrefill | PortablePrefill | LatentPrefill


class Attentions:
    """The launchers for all layers of a model, which have equal heads.

    max_context  tokens that a sequence may have

    A step has one set of pieces and tiles, for layers with and without a window: `decode` and `prefill`, the
    launchers for the first layer, make them.
    """

    def __init__(self, device: Device, spec: ModelSpec, *, max_context: int) -> None:
        self._known: dict[object, tuple[Decode, Prefill]] = {}
        self.decode: Decode
        self.prefill: Prefill
        if spec.latents:
            latent = spec.latents[0]
            self.decode = latent_decode(device, latent, max_context=max_context)
            self.prefill = latent_prefill(device, latent)
            self._known = {_kind(one): (self.decode, self.prefill) for one in spec.latents}
            return
        first = spec.attentions[0]
        self.decode = decode_attention(device, first, max_context=max_context)
        self.prefill = prefill_attention(device, first)
        self._known[_kind(first)] = self.decode, self.prefill
        for other in spec.attentions:
            if _kind(other) not in self._known:
                decode = decode_attention(device, other, max_context=max_context, beside=self.decode)
                self._known[_kind(other)] = decode, prefill_attention(device, other, self.prefill)

    def of(self, attention: Attention | LatentAttention) -> tuple[Decode, Prefill]:
        """Return the launchers for the drawn tokens, and for the prompts, of such a layer."""
        return self._known[_kind(attention)]


def _kind(attention: Attention | LatentAttention) -> tuple[object, ...]:
    """What layers with equal heads differ in."""
    if isinstance(attention, LatentAttention):
        return (attention.scale,)
    return score_arguments(attention), attention.sinks


def decode_attention(
    device: Device, attention: Attention, *, max_context: int, beside: Decode | None = None
) -> Decode:
    """Choose the launcher of attention for drawn tokens.

    max_context  tokens that a sequence may have
    beside       for other layers of the model
    """
    if DecodeAttention.suits(attention):
        other = beside if isinstance(beside, DecodeAttention) else None
        return DecodeAttention(device, attention, max_context=max_context, beside=other)
    return GeneralDecode(device, attention)


def prefill_attention(device: Device, attention: Attention, beside: Prefill | None = None) -> Prefill:
    """Choose the launcher of attention for chunks of prompts; `beside`: that of the model's other layers."""
    if HopperPrefill.suits(attention, hopper=device.hopper):
        return HopperPrefill(device, attention, beside if isinstance(beside, HopperPrefill) else None)
    return PortablePrefill(device, attention)
