"""From the sum of hidden states to an embedding: a vector of length 1 in float32."""

import math

from nightmill.worker.runners.base import SumArray

__all__ = ["normalised"]


def normalised(total: SumArray, dimensions: int | None = None) -> bytes:
    """Return the first `dimensions` elements of a sum (width,), divided by their length, as float32 bytes.

    A mean is a sum that was divided, so it has the same direction. The length is summed exactly: it depends
    on no order of additions. A sum of zeros stays zeros.
    """
    kept = total[:dimensions]
    length = math.sqrt(math.fsum((kept * kept).tolist()))
    return (kept / length if length else kept).astype("<f4").tobytes()
