"""Mamba-2 (Granite 4, Nemotron)."""

from nightmill.worker.model.spec import Mamba2
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.convolution import Convolution, convolution_refusal
from nightmill.worker.runners.gpu.states.operands import LayerStates, MixerWeights, StepPieces

__all__ = ["Mamba"]

_SIZES = (32, 64, 80, 96, 128)


class Mamba:
    """Launches `convolution.cu`, `mamba_recurrent.cu`, `mamba_chunked.cu` and `gated_norm.cu`.

    work  float (rows, mixer.convolved): room for the rows of a step, which layers may share
    """

    def __init__(self, device: Device, mixer: Mamba2, work: Buffer) -> None:
        raise NotImplementedError

    @staticmethod
    def sources(mixer: Mamba2) -> list[Source]:
        """List the kernel files for a mixer."""
        raise NotImplementedError

    @staticmethod
    def refusal(mixer: Mamba2) -> str | None:
        """Return what of a mixer no kernel takes, or None."""
        raise NotImplementedError

    def __call__(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue it as `Mixer` says."""
        raise NotImplementedError
