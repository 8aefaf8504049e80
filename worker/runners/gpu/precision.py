"""Precision of a runner: the formats of weights, activations, keys and values that a person may choose."""

from dataclasses import dataclass
from enum import Enum

from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["HALF", "Precision", "WeightsFormat"]


class WeightsFormat(Enum):
    """Storage of weight matrices; the value is the word that a person asks for it with."""

    AUTO = "auto"
    """ELEMENT or FILE, by the memory that there is (`weights.choice`)."""
    FILE = "file"
    """Weights as in the file, bit for bit; products multiply what packed formats are as elements."""
    ELEMENT = "16bit"
    """Dequantised to the element when they are loaded."""
    FP8 = "fp8"
    """Rounded to E4M3 when they are loaded, and multiplied so. Embedding and head are elements."""

    @property
    def rounded(self) -> Format | None:
        """The format that matrices of layers are rounded to when they are loaded; None if none is rounded."""
        return Format.FP8 if self is WeightsFormat.FP8 else None

    @property
    def words(self) -> str:
        """Words for a person, behind "weights"."""
        return _WORDS[self]


_WORDS = {
    WeightsFormat.AUTO: "by the memory that there is",
    WeightsFormat.FILE: "as in the file",
    WeightsFormat.ELEMENT: "in 16 bits",
    WeightsFormat.FP8: "in FP8",
}


@dataclass(frozen=True, slots=True)
class Precision:
    """Formats of a runner. Texts depend on them: they are part of the arithmetic's name.

    element         of activations, and of weights, keys and values that have no other format
    plain_products  matrices that stay packed become elements before each product; slower, and the same bits
    """

    element: Element = Element.F16
    weights: WeightsFormat = WeightsFormat.ELEMENT
    kv: KvFormat = KvFormat.ELEMENT
    plain_products: bool = False

    @property
    def weights_name(self) -> str:
        """Value of `Arithmetic.weights`: `f16`, `file in f16`, `fp8 in f16`; of AUTO once it is chosen."""
        kept = self.weights in (WeightsFormat.FILE, WeightsFormat.FP8)
        return f"{self.weights.value} in {self.element.value}" if kept else self.element.value

    @property
    def words(self) -> str:
        """Words for a person on all that is in another format than the element; empty if nothing is."""
        changed = self.weights is WeightsFormat.FILE or self.weights.rounded is not None
        parts = {
            f"weights {self.weights.words}": changed,
            "plain products": self.plain_products,
            "keys and values in FP8": self.kv is KvFormat.FP8,
        }
        return ", ".join(words for words, named in parts.items() if named)

    @property
    def kv_name(self) -> str:
        """Value of `Arithmetic.kv`: `f16`, `fp8`."""
        return self.element.value if self.kv is KvFormat.ELEMENT else self.kv.value


HALF = Precision()
"""All in F16."""
