"""Gated delta nets (Qwen3.5 and later)."""

from nightmill.worker.model.spec import GatedDeltaNet
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.convolution import Convolution, convolution_refusal
from nightmill.worker.runners.gpu.states.operands import LayerStates, MixerWeights, StepPieces

__all__ = ["DeltaNet"]

_SIZES = (32, 64, 96, 128)  # of keys, and of values


class DeltaNet:
    """Launches `convolution.cu`, `delta_recurrent.cu`, `delta_chunked.cu` and `gated_norm.cu`.

    work  float (rows, mixer.convolved): room for the rows of a step, which layers may share
    """

    def __init__(self, device: Device, mixer: GatedDeltaNet, work: Buffer) -> None:
        raise NotImplementedError

    @staticmethod
    def sources(mixer: GatedDeltaNet) -> list[Source]:
        """List the kernel files for a mixer."""
        raise NotImplementedError

    @staticmethod
    def refusal(mixer: GatedDeltaNet) -> str | None:
        """Return what of a mixer no kernel takes, or None."""
        raise NotImplementedError

    def __call__(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue it as `Mixer` says."""
        raise NotImplementedError
