"""The default element of a model, by its family and by what its file holds."""

import math
from collections import Counter
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.element import Element

__all__ = ["ElementChoice", "choose_element"]


@dataclass(frozen=True, slots=True)
class ElementChoice:
    """An element; `why`, for a person."""

    element: Element
    why: str

    def __str__(self) -> str:
        return f"{self.element.name} ({self.why})"


def choose_element(file: GgufFile, spec: ModelSpec, dtype: str = "auto") -> ElementChoice:
    """The element of that name; for "auto", half, whose precision is higher, unless its range may not do.

    That is so for families that are known to go beyond it, and for files that hold what a model was trained
    in: large models of any family go beyond it here and there.
    """
    if dtype != "auto":
        return ElementChoice(Element(dtype), "as asked for")
    if spec.overflows_half:
        return ElementChoice(Element.BF16, f"{spec.family} computes numbers beyond the range of F16")
    numbers: Counter[GGMLQuantizationType] = Counter()
    for _, weight in spec.all_weights():
        if weight.is_matrix:
            for name, shape in weight.parts:
                numbers[file.tensors[name].kind] += math.prod(shape)
    if 2 * numbers[GGMLQuantizationType.BF16] > numbers.total():
        return ElementChoice(Element.BF16, "as most of the file's weights are")
    return ElementChoice(Element.F16, "more precise than BF16")
