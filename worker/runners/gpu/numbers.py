"""In which formats a runner computes with numbers and keeps them: what a person may choose."""

from dataclasses import dataclass
from enum import Enum

from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["HALF", "Numbers", "WeightNumbers"]


class WeightNumbers(Enum):
    """How matrices of weights are kept; the value is what a person asks for."""

    AUTO = "auto"
    """As ELEMENT or as FILE, by the memory that there is (`weights.choice`)."""
    FILE = "file"
    """As in the file, bit for bit. A product has the bits that it has over dequantised weights."""
    ELEMENT = "16bit"
    """Dequantised to the element when they are loaded: what FILE is compared with, at more memory."""
    FP8 = "fp8"
    """Rounded to E4M3 when they are loaded, and multiplied so. Embedding and head are elements."""

    @property
    def words(self) -> str:
        """For a person, behind "weights"."""
        return _WORDS[self]


_WORDS = {
    WeightNumbers.AUTO: "by the memory that there is",
    WeightNumbers.FILE: "as in the file",
    WeightNumbers.ELEMENT: "in 16 bits",
    WeightNumbers.FP8: "in FP8",
}


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a runner is told of its formats. Texts depend on them: they are part of the arithmetic's name.

    element         of activations, and of weights, keys and values that are kept in no other format
    plain_products  matrices that stay packed become elements before each product; slower, and the same bits
    """

    element: Element = Element.F16
    weights: WeightNumbers = WeightNumbers.ELEMENT
    kv: KvFormat = KvFormat.ELEMENT
    plain_products: bool = False

    @property
    def weights_name(self) -> str:
        """For `Arithmetic.weights`: `f16`, `fp8 in f16`. AUTO, FILE and ELEMENT give the same bits."""
        element = self.element.value
        return f"fp8 in {element}" if self.weights is WeightNumbers.FP8 else element

    @property
    def words(self) -> str:
        """What is kept in another format than the element, for a person; nothing if all is."""
        said = {
            f"weights {self.weights.words}": self.weights in (WeightNumbers.FILE, WeightNumbers.FP8),
            "plain products": self.plain_products,
            "keys and values in FP8": self.kv is KvFormat.FP8,
        }
        return ", ".join(words for words, so in said.items() if so)

    @property
    def kv_name(self) -> str:
        """For `Arithmetic.kv`: `f16`, `fp8`."""
        return self.element.value if self.kv is KvFormat.ELEMENT else self.kv.value


HALF = Numbers()
"""All in F16."""
