"""Weights as the file has them, in GGUF's block formats: sources, workspace and launchers of their products.

Kernels multiply packed matrices as they are, in tiles, and for few rows by warps. Any product can also be
computed by way of elements (`unpack.py`), which is faster with many rows and serves every format and GPU.
"""

from collections.abc import Callable, Collection

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Buffer, Format
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.elements.format import ElementProducts
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedProduct, PackedTiles
from nightmill.worker.runners.gpu.products.packed.packed_mma import PackedMma
from nightmill.worker.runners.gpu.products.packed.packed_qkv import PackedQkv
from nightmill.worker.runners.gpu.products.packed.packed_rows import PackedRows
from nightmill.worker.runners.gpu.products.packed.unpack import Unpacked
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Candidate, ProductLauncher, Shape
from nightmill.worker.runners.gpu.weights.repacker import Repacker

__all__ = ["PackedProducts"]

# Up to which a matrix is not worth being dequantised before it is multiplied. On other cards than Hopper its
# bytes, written and read as elements, take the time of some hundred rows' products, by their bandwidths.
_FEW_ROWS, _FEW_ROWS_OF_TILES = 64, 256


class PackedProducts:
    """Launches products with packed weights.

    products           kinds and formats that kernels multiply as they are (`packed_products`); other packed
                       matrices become elements first
    unpacked           bytes of room for these elements (`workspace`); 0: nothing becomes elements
    elements           products with weights that are elements
    activate, gate_up  activations by themselves, and room for what they read, elements (rows, 2 F)
    """

    def __init__(
        self, device: Device, products: Collection[PackedProduct], unpacked: int, elements: ElementProducts,
        activate: Activate, gate_up: Buffer,
    ) -> None:  # fmt: skip
        self.multiplies = bool(products)
        """True if kernels multiply packed matrices as they are."""
        self._kernels: list[ProductLauncher] = []
        if products and device.hopper:
            self._kernels = [PackedFew(device, products), PackedTiles(device, products)]
        elif products:
            formats = {format_ for _, format_ in products}
            portable = (PackedRows, PackedMma)
            self._kernels = [one(device, formats, activate, gate_up) for one in portable]
        self._few_rows = _FEW_ROWS if device.hopper else _FEW_ROWS_OF_TILES
        self._unpacked = Unpacked(device, unpacked, elements.candidates) if unpacked else None

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """Kernel files for the packed matrices of a model; none if it has none."""
        launchers = (PackedTiles, PackedFew, PackedQkv, PackedRows, PackedMma, Unpacked, Repacker)
        return [s for launcher in launchers for s in launcher.sources(spec, precision, hopper=hopper)]

    @staticmethod
    def workspace(spec: ModelSpec, precision: Precision) -> int:
        """Bytes of device memory for packed matrices that become elements."""
        return Unpacked.workspace(spec, precision)

    def reference(self, shape: Shape, elements: Callable[[Shape], Candidate | None]) -> Candidate | None:
        """The kernel whose bits products with packed weights have: through elements, by `elements`."""
        if self._unpacked is None or not (shape.format.packed or shape.format is Format.MIXED):
            return None
        one = elements(self._unpacked.first_piece(shape))
        return None if one is None else self._unpacked.through(one)

    def candidates(self, shape: Shape) -> list[Candidate]:
        """Kernels for a shape, the best guess first; none if its weights are not packed."""
        kernels = [one for launcher in self._kernels for one in launcher.candidates(shape)]
        if self._unpacked is None or (kernels and shape.rows <= self._few_rows):
            return kernels
        return kernels + self._unpacked.candidates(shape)
