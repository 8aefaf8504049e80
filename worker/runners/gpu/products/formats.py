"""The formats of a model's weights, which answer for all of a runner that depends on them.

A precision is asked here, and only here, which kernels multiply its weights. `ModelFormats` then answers for
sources, workspace, activations, products, and for the rounding of weights as they are loaded. A new format
is a folder beside `elements`, `packed` and `fp8`; one that matrices are rounded to is a `RoundedFormat`,
with a line in `_ROUNDED`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.chosen import NamedGpu
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.kinds import kinds_of
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.agreeing import Agreement
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.elements.format import ElementProducts
from nightmill.worker.runners.gpu.products.elements.mma_gemm import MmaTiles
from nightmill.worker.runners.gpu.products.fp8.format import Fp8Format
from nightmill.worker.runners.gpu.products.packed.format import PackedProducts
from nightmill.worker.runners.gpu.products.packed.packed_gemm import packed_products
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import Kind, ProductLauncher
from nightmill.worker.runners.gpu.weights.dequantizer import Dequantizer

__all__ = ["MatrixRounder", "ModelFormats", "RoundedFormat", "rounded_format"]


class MatrixRounder(Protocol):
    """Rounds tensors of a file to a format, on the GPU."""

    def load(
        self, raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, matrix: Matrix, first: int, rows: int
    ) -> None:
        """Queue the tensor of `rows` rows with these bytes to be written from row `first` of a matrix on."""
        ...

    def close(self) -> None:
        """Give the scratch memory back, when all that was queued is done."""
        ...


class RoundedFormat(Protocol):
    """A format that matrices of layers are rounded to when they are loaded.

    Embedding and head are elements then, and multiplied by the library alone.
    """

    @property
    def activations(self) -> np.dtype[Any]:
        """Type of the rows that its products read."""
        ...

    @property
    def layer_seconds(self) -> float:
        """Time of a layer's launches in a step beyond those of elements, for forecasts."""
        ...

    def speedup(self, width: int) -> float:
        """Rate of products of many rows over that of elements, by the model's width."""
        ...

    def sources(self, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """Kernel files of a model whose layers have this format."""
        ...

    def refusal(self, spec: ModelSpec) -> str | None:
        """Reason why the kernels do not take a model, for a person; None if they do."""
        ...

    def refusal_on(self, gpu: NamedGpu) -> str | None:
        """Reason why a GPU cannot multiply it, for a person; None if it can."""
        ...

    def launcher(self, device: Device, kinds: Collection[Kind], quantised: Buffer) -> ProductLauncher:
        """Load the kernels for these kinds of products; `quantised`: room for activations to be rounded."""
        ...

    def rounder(self, device: Device, dequantizer: Dequantizer) -> MatrixRounder:
        """Take the scratch memory with which tensors of a file are rounded to it."""
        ...


_ROUNDED: Mapping[Format, RoundedFormat] = {Format.FP8: Fp8Format()}


def rounded_format(weights: WeightsFormat) -> RoundedFormat | None:
    """The format that layers are rounded to; None if they are elements, or packed as in the file."""
    return None if weights.rounded is None else _ROUNDED[weights.rounded]


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats of the weights of a model, at the precision of a runner."""

    spec: ModelSpec
    precision: Precision

    @property
    def rounded(self) -> RoundedFormat | None:
        """The format that layers are rounded to; None if they are elements, or packed as in the file."""
        return rounded_format(self.precision.weights)

    def sources(self, *, hopper: bool) -> list[Source]:
        """Kernel files of all products; those that compile longest first."""
        layers = self.rounded or ElementProducts
        packed = PackedProducts.sources(self.spec, self.precision, hopper=hopper)
        head = MmaTiles.sources(self.spec, hopper=hopper) if self.rounded else []
        return [*layers.sources(self.spec, hopper=hopper), *packed, *head, *Agreement.sources()]

    def workspace(self) -> int:
        """Bytes of device memory that products take, beside activations."""
        return ElementProducts.workspace() + PackedProducts.workspace(self.spec, self.precision)

    def products(self, device: Device, activate: Activate, gate_up: Buffer, quantised: Buffer) -> Products:
        """Load the kernels of all products.

        activate, gate_up  activations by themselves, and room for what they read, elements (rows, 2 F)
        quantised          room for rows of activations in the format that layers are rounded to
        """
        kinds, rounded = kinds_of(self.spec), self.rounded
        elements = ElementProducts(device, activate, gate_up, kinds if rounded is None else ())
        packed = PackedProducts(
            device, packed_products(self.spec, self.precision),
            PackedProducts.workspace(self.spec, self.precision), elements, activate, gate_up,
        )  # fmt: skip
        launcher = None if rounded is None else rounded.launcher(device, kinds, quantised)
        products = Products(device, elements, packed, launcher)
        if self.precision.plain_products:  # the start before may have hung in a way that was kept
            products.clock.remembered.forget()
        return products
