"""Inputs of layers for the token itself, made of rows of a second embedding and a product of the first."""

import math

from nightmill.worker.model.spec import Activation, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPair, KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.weights.layout import NormWeight

__all__ = ["LayerInputRows"]

_WARPS = 8


class LayerInputRows:
    """Launches `layer_inputs.cu`. The table stays as it is in the file: rows are unpacked as tokens come."""

    def __init__(self, device: Device, spec: ModelSpec) -> None:
        inputs = spec.layer_inputs
        assert inputs is not None
        self._layers, self._width, self._vocab = len(spec.layers), inputs.width, spec.vocab
        self._scale, self._table_scale = spec.width**-0.5, math.sqrt(inputs.width)
        self._kernels = kernels = KernelPairs(device, source_of("layer_inputs"))
        self._make: dict[Format, KernelPair] = {}
        self._gate = kernels.function("gate_inputs", "PPPiiii")

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("layer_inputs")] if spec.layer_inputs is not None else []

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the part of a model that it does not take, or None."""
        if (inputs := spec.layer_inputs) is None:
            return None
        if inputs.width % 8 or inputs.norm.centred or inputs.norm.bias:
            return f"layers' inputs of {inputs.width} elements (multiples of 8, with RMS norms)"
        if inputs.activation is not Activation.GELU:
            return f"the activation {inputs.activation} of layers' inputs"
        return None

    def make(self, tokens: Buffer, table: Matrix, made: Buffer, norm: NormWeight, rows: int) -> None:
        """Queue the inputs of all layers for tokens (rows,): in the place of made (rows, layers, width).

        made  the product of the tokens' embeddings, as elements
        """
        if rows:
            self._of(table.format).of(rows)(
                (-(-rows * self._layers // _WARPS), 1), (32 * _WARPS, 1, 1), tokens.address, table.address,
                made.address, norm.weight.address, rows, self._layers, self._width, self._vocab, self._scale,
                norm.eps, self._table_scale,
            )  # fmt: skip

    def _of(self, format_: Format) -> KernelPair:
        """The kernel for tables of a format."""
        if format_ not in self._make:
            name = f"layer_inputs_{format_.name}" if format_.packed else "layer_inputs"
            self._make[format_] = self._kernels.function(name, "PPPPiiiifff")
        return self._make[format_]

    def gate(self, gate: Buffer, made: Buffer, layer: int, rows: int, indices: int) -> None:
        """Queue gate (rows, width) elements to be activated and multiplied by a layer's inputs, in place.

        indices  address of the rows of `made`; 0: they are the first
        """
        if rows:
            self._gate.of(rows)(
                blocks_for(rows * self._width // 8), (256, 1, 1), gate.address, made.address, indices, rows,
                self._layers, layer, self._width,
            )  # fmt: skip
