"""The default of `--weights`: elements if memory is ample, else the formats of the file.

A model with experts keeps the formats of the file in any case: of its weights a step reads many and computes
few rows with each. As in the file they take less memory, and on an H200 a 7B in Q4_K_M is faster so with up
to 64 sequences, and slower with 256 (docs/models.md). Texts may differ between the two, by rounding.
"""

from dataclasses import replace

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.weights.layout import weight_bytes

__all__ = ["choose_weights"]

_GIB = 1 << 30


def choose_weights(spec: ModelSpec, precision: Precision, budget: int) -> tuple[Precision, str]:
    """The numbers with another choice than AUTO, and why, for a person; `budget`: bytes that may be used.

    Elements, if these take at most half of it and there are no experts, or the file's form is no smaller;
    else as in the file.
    """
    if precision.weights is not WeightsFormat.AUTO:
        return precision, f"{precision.weights.words}, as asked for"
    elements, as_in_file = (
        replace(precision, weights=one) for one in (WeightsFormat.ELEMENT, WeightsFormat.FILE)
    )
    size = weight_bytes(spec, elements)
    if weight_bytes(spec, as_in_file) >= size:
        return elements, "in 16 bits: the file has none that are smaller"
    share = f"{size / _GIB:.1f} of the {budget / _GIB:.1f} GiB that may be used"
    if spec.experts:
        return as_in_file, "as in the file, which experts are read from fastest"
    if 2 * size <= budget:
        return elements, f"in 16 bits, fastest with many sequences: they take {share}"
    return as_in_file, f"as in the file: in 16 bits they would take {share}"
