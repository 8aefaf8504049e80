"""Which kernels compute a model's attention: the first that suit it."""

from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.device.device import Device

__all__ = ["Decode", "Prefill", "decode_attention", "prefill_attention"]

Decode = DecodeAttention | GeneralDecode
Prefill = HopperPrefill | PortablePrefill


def decode_attention(device: Device, attention: Attention, *, max_context: int) -> Decode:
    """For drawn tokens; max_context: tokens that a sequence may have."""
    if DecodeAttention.suits(attention):
        return DecodeAttention(device, attention, max_context=max_context)
    return GeneralDecode(device, attention)


def prefill_attention(device: Device, attention: Attention) -> Prefill:
    """For chunks of prompts."""
    if HopperPrefill.suits(attention, hopper=device.hopper):
        return HopperPrefill(device, attention)
    return PortablePrefill(device, attention)
