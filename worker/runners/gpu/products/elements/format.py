"""Weights as 16-bit elements, half or bfloat16: sources, workspace and launchers of their products.

Every GPU multiplies them by tiles of ours, or by algorithms of cuBLASLt with the same sums, whichever is
faster. Tiles have the activation of a gate, or the sum with the residual stream, inside.
"""

from collections.abc import Collection

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.products.elements.few_rows import FewRows
from nightmill.worker.runners.gpu.products.elements.hopper_gemm import HopperTiles
from nightmill.worker.runners.gpu.products.elements.hopper_qkv import HopperQkv
from nightmill.worker.runners.gpu.products.elements.hopper_split import SplitTiles
from nightmill.worker.runners.gpu.products.elements.library import LibraryProducts
from nightmill.worker.runners.gpu.products.elements.mma_gemm import MmaTiles
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Candidate, Kind, ProductLauncher, Shape

__all__ = ["ElementProducts"]


class ElementProducts:
    """Launches products with weights that are elements.

    activate, gate_up  activations by themselves, and room for what they read, elements (rows, 2 F)
    kinds              of products that tiles for Hopper are loaded for, if it is one
    """

    def __init__(self, device: Device, activate: Activate, gate_up: Buffer, kinds: Collection[Kind]) -> None:
        self._format = device.element.format
        self._library = LibraryProducts(device, activate, gate_up)
        self._mma = MmaTiles(device, alone=not device.hopper)
        self._tiles: list[ProductLauncher] = [self._mma]
        if device.hopper and kinds:
            self._tiles = [HopperTiles(device, kinds), SplitTiles(device, kinds)]

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """Kernel files of a model whose layers are elements; those that compile longest first."""
        launchers = (HopperTiles, HopperQkv, SplitTiles, FewRows, MmaTiles)
        return [source for launcher in launchers for source in launcher.sources(spec, hopper=hopper)]

    @staticmethod
    def workspace() -> int:
        """Bytes of device memory that the library takes."""
        return LibraryProducts.workspace()

    @property
    def scratch(self) -> int:
        """Address of `workspace()` bytes that may be overwritten between two launches."""
        return self._library.scratch

    def candidates(self, shape: Shape) -> list[Candidate]:
        """Kernels for a shape, the best guess first; none if its weights are no elements."""
        if shape.format is not self._format:
            return []
        tiles = [one for launcher in self._tiles for one in launcher.candidates(shape)]
        if not tiles:
            tiles = self._mma.candidates(shape)
        library = self._library.candidates(shape)
        return library + tiles if shape.kind.activation is None else tiles + library

    def reference(self, shape: Shape) -> Candidate | None:
        """The kernel whose bits products over elements have; None if there are none for the shape."""
        return self._mma.reference(shape)

    def close(self) -> None:
        """Let go of cuBLASLt; the memory goes with the device."""
        self._library.close()
