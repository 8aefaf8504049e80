"""Tensor maps, which describe matrices and tensors to bulk tensor copies; made once for each."""

import ctypes
import math

from nightmill.worker.runners.gpu.device.device import CudaError, Device
from nightmill.worker.runners.gpu.device.functions import bindings, error_text
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FP8, PANEL_ROWS, Format

__all__ = ["NO_MAP", "PIECE_BYTES", "PIECE_ROWS", "TensorMaps"]

PIECE_ROWS, PIECE_BYTES = 64, 128  # of the boxes in which results leave
NO_MAP = bytes(128)
_FLOATS, _BYTES = "CU_TENSOR_MAP_DATA_TYPE_FLOAT32", "CU_TENSOR_MAP_DATA_TYPE_UINT8"
_BOX_COLUMNS, _BOX_BYTES = 64, 128  # elements, FP8: the width of the swizzle
_WORDS = "CU_TENSOR_MAP_DATA_TYPE_FLOAT64"
_FLOAT, _WORD = 4, 8  # bytes


class TensorMaps:
    """The maps of matrices and tensors, kept."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[int, ...], bytes] = {}

    def __call__(self, address: int, rows: int, columns: int, box: int) -> bytes:
        """The tensor map of a row-major matrix of elements, with boxes of 64 columns and `box` rows."""
        return self._map(address, (columns, rows), (_BOX_COLUMNS, box))

    def of_fp8(self, address: int, rows: int, columns: int, box: int) -> bytes:
        """Make the map of an FP8 matrix, with a multiple of 16 columns, in boxes of 128 columns."""
        return self._map(address, (columns, rows), (_BOX_BYTES, box), FP8.itemsize)

    def of_three(self, address: int, sizes: tuple[int, int, int], box: tuple[int, int]) -> bytes:
        """The map of elements (planes, rows, columns); boxes of `box` planes and rows, 64 columns."""
        return self._map(address, sizes[::-1], (_BOX_COLUMNS, *box[::-1]))

    def of_results(self, address: int, rows: int, columns: int, *, floats: bool = False) -> bytes:
        """The tensor map of a row-major matrix of elements or floats, with boxes of 64 rows by 128 bytes."""
        size = _FLOAT if floats else ELEMENT.itemsize
        return self._map(address, (columns, rows), (PIECE_BYTES // size, PIECE_ROWS), size)

    def of_packed(self, address: int, rows: int, columns: int, format_: Format, panels: int) -> bytes:
        """The map of a packed matrix, a row of 8-byte words a panel; boxes of a packet by `panels`."""
        words, steps = format_.packet // _WORD, -(-columns // format_.step)
        return self._map(address, (steps * words, -(-rows // PANEL_ROWS)), (words, panels), _WORD)

    def _map(
        self, address: int, sizes: tuple[int, ...], box: tuple[int, ...], itemsize: int = ELEMENT.itemsize
    ) -> bytes:
        """Sizes and box: fastest dimension first; words are not swizzled."""
        key = (address, itemsize, *sizes, *box)
        if (known := self._known.get(key)) is not None:
            return known
        driver = bindings()
        element, kinds = self._device.element.map_type, {FP8.itemsize: _BYTES, _FLOAT: _FLOATS, _WORD: _WORDS}
        name, swizzle = kinds.get(itemsize, element), "NONE" if itemsize == _WORD else "128B"
        strides = [itemsize * math.prod(sizes[:count]) for count in range(1, len(sizes))]
        status, made = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, name), len(sizes), address,
            [driver.cuuint64_t(size) for size in sizes], [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box], [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
        if status != 0:
            shown = " x ".join(str(size) for size in reversed(sizes))
            raise self._device.named(CudaError(error_text(status)), f"describing {shown} at {address:#x}")
        self._known[key] = encoded = ctypes.string_at(int(made.getPtr()), 128)
        return encoded
