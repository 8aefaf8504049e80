"""Weights in FP8: storage, activations, sources and launchers of their products.

Matrices of layers are rounded to E4M3 when they are loaded, with a float scale for each row, an output. Their
products read activations in E4M3 with a scale for each row: RMS norms write them so, and what comes as
elements is rounded first. Only Hopper multiplies them here.
"""

from collections.abc import Collection

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.chosen import NamedGpu
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import FP8, Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.products.fp8.hopper_fp8 import HopperFp8
from nightmill.worker.runners.gpu.products.fp8.mma_fp8 import MmaFp8
from nightmill.worker.runners.gpu.products.fp8.quantise import Quantise
from nightmill.worker.runners.gpu.products.fp8.rounding import Rounder
from nightmill.worker.runners.gpu.shapes import Kind, ProductLauncher
from nightmill.worker.runners.gpu.weights.dequantizer import Dequantizer

__all__ = ["Fp8Format"]

_WIDTH_WITHOUT_GAIN = 560


class Fp8Format:
    """The FP8 format of weights (`products.formats.RoundedFormat`)."""

    activations = FP8
    layer_seconds = 9e-6  # one sequence of a 0.5B on an H200

    def sources(self, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """Kernel files of a model whose layers are FP8; those that compile longest first."""
        launchers = (HopperFp8, MmaFp8, Quantise)
        return [source for launcher in launchers for source in launcher.sources(spec, hopper=hopper)]

    def refusal(self, spec: ModelSpec) -> str | None:
        """Reason why the kernels do not take a model, for a person; None if they do."""
        odd = HopperFp8.refusal(spec)
        return odd and f"the kernels for FP8 weights do not take {odd}: give another --weights"

    def refusal_on(self, gpu: NamedGpu) -> str | None:
        """Reason why a GPU cannot multiply it, for a person; None if it can."""
        if gpu.hopper or gpu.fp8:
            return None
        return (
            "FP8 weights need a GPU of compute capability 8.9 or newer (RTX 40-series, L40S, H100), which "
            f"{gpu.name} is not: give another --weights"
        )

    def speedup(self, width: int) -> float:
        """1.23 and 1.73 times as fast as F16: prompts of a 0.5B and of a 7B on an H200."""
        return 2 * width / (width + _WIDTH_WITHOUT_GAIN)

    def launcher(self, device: Device, kinds: Collection[Kind], quantised: Buffer) -> ProductLauncher:
        """Load the kernels for these kinds of products; `quantised`: room for activations to be rounded."""
        return (HopperFp8 if device.hopper else MmaFp8)(device, kinds, quantised)

    def rounder(self, device: Device, dequantizer: Dequantizer) -> Rounder:
        """Take the scratch memory with which tensors of a file are rounded to it."""
        return Rounder(device, dequantizer)
