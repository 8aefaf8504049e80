"""The formats of keys and values."""

from enum import Enum

__all__ = ["KvFormat"]


class KvFormat(Enum):
    """Type of the numbers in the KV cache; the value is the word that settings use.

    ELEMENT  as the runner computes: on a GPU F16 or BF16, in NumPy F32
    FP8      E4M3, 8 bits, times a power of two that a token's numbers have in common in a KV head
    """

    ELEMENT = "16bit"
    FP8 = "fp8"
