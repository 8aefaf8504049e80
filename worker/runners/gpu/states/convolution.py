"""Causal convolutions, by themselves (LFM2's short convolutions) and ahead of recurrences."""

from dataclasses import replace

from nightmill.worker.model.spec import ShortConv
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.operands import LayerStates, MixerWeights, Pieces, StepPieces

__all__ = ["Convolution", "ShortConvolution", "convolution_refusal"]

_THREADS = 128
_WIDE = 8  # channels of a thread
_TILE = 16  # rows of a thread
_BLOCK = (_THREADS, 1, 1)
_KERNELS = (2, 3, 4)


def convolution_refusal(kernel: int, channels: int) -> str | None:
    """Return what of a convolution no kernel takes, or None."""
    if kernel not in _KERNELS:
        return f"a convolution over {kernel} tokens (2 to 4)"
    return f"a convolution of {channels} channels (multiples of {_WIDE})" if channels % _WIDE else None


class Convolution:
    """Launches `convolution.cu` over so many tokens; `short`: of b x, times c (LFM2), without SiLU."""

    def __init__(self, device: Device, kernel: int, *, short: bool = False) -> None:
        kernels = KernelPairs(device, self.source(kernel, short=short))
        self._prompts = kernels.function("convolve_prompts", "PiiiPPPPPPPiiP")
        self._keep = kernels.function("keep_inputs", "PiiPPPPP")
        self._drawn = kernels.function("convolve_drawn", "PiiPPPPPPPP")

    @staticmethod
    def source(kernel: int, *, short: bool = False) -> Source:
        """The kernel file and its options."""
        return source_of("convolution", f"-DTAPS={kernel}", f"-DSHORT={int(short)}")

    def prompts(
        self, x: Buffer, channels: int, weights: MixerWeights, states: LayerStates, pieces: Pieces,
        out: Buffer, *, first: int = 0,
    ) -> None:  # fmt: skip
        """Queue it for pieces of prompts and the first columns of x; `keep` has to follow.

        x      elements (rows, stride): `channels` of each row, or, short, b, c and x of so many each
        out    float (rows, channels): SiLU of the convolution; or, short, elements: c times the convolution
        first  channels before that one are left out
        """
        if pieces.count:
            grid = _across(channels - first), -(-pieces.rows // _TILE)
            self._prompts.of(pieces.rows)(
                grid, _BLOCK, x.address, x.shape[1], channels, first, weights.convolution.address,
                weights.convolution_bias.address, states.inputs, *pieces.addresses, pieces.count,
                pieces.rows, out.address,
            )  # fmt: skip

    def keep(self, x: Buffer, channels: int, states: LayerStates, pieces: Pieces) -> None:
        """Queue that the last inputs of prompts become those of their slots."""
        if pieces.count:
            self._keep.of(pieces.rows)(
                (_across(channels), pieces.count), _BLOCK, x.address, x.shape[1], channels, states.inputs,
                *pieces.addresses,
            )  # fmt: skip

    def drawn(
        self, x: Buffer, channels: int, weights: MixerWeights, states: LayerStates, pieces: Pieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue it for drawn pieces, and that their last inputs become those of their slots."""
        if pieces.count:
            self._drawn.of(pieces.count)(
                (_across(channels), pieces.count), _BLOCK, x.address, x.shape[1], channels,
                weights.convolution.address, weights.convolution_bias.address, states.inputs,
                *pieces.addresses, out.address,
            )  # fmt: skip


def _across(channels: int) -> int:
    """Blocks of so many channels."""
    return -(-channels // (_WIDE * _THREADS))


class ShortConvolution:
    """The mixer of LFM2: out = c * convolution(b * x), where b, c and x are a row's columns."""

    def __init__(self, device: Device, mixer: ShortConv) -> None:
        self._width = mixer.width
        self._convolution = Convolution(device, mixer.kernel, short=True)

    @staticmethod
    def sources(mixer: ShortConv, *, hopper: bool = False) -> list[Source]:
        """List the kernel files for a mixer."""
        return [Convolution.source(mixer.kernel, short=True)]

    @staticmethod
    def refusal(mixer: ShortConv) -> str | None:
        """Return what of a mixer no kernel takes, or None."""
        return convolution_refusal(mixer.kernel, mixer.width)

    def __call__(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue it as `Mixer` says, prompts first; there are no controls."""
        convolution, width = self._convolution, self._width
        convolution.prompts(x, width, weights, states, pieces.prompts, out)
        convolution.keep(x, width, states, pieces.prompts)
        convolution.drawn(x, width, weights, states, pieces.drawn, out)


def columns_from(x: Buffer, column: int) -> Buffer:
    """The same rows, without the columns before that one."""
    return replace(x, address=x.address + column * x.dtype.itemsize)
