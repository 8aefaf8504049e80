"""The tables that GGUF's IQ types of one to three bits index, unpacked from where `gguf` keeps them."""

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

__all__ = ["grid_of"]


def grid_of(kind: GGMLQuantizationType) -> npt.NDArray[np.int8] | None:
    """A type's table, (rows, weights of a group); None for a type that has none."""
    type_ = getattr(quants, kind.name, None)
    if type_ is None or type_.grid_hex is None:
        return None
    type_.init_grid()
    grid: npt.NDArray[np.float32] = type_.grid[0, 0]
    return np.ascontiguousarray(grid, dtype=np.int8)
