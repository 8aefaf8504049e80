"""Causal convolutions, by themselves (LFM2's short convolutions) and ahead of recurrences."""

from dataclasses import replace

from nightmill.worker.model.spec import ShortConv
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.operands import LayerStates, MixerWeights, StepPieces

__all__ = ["Convolution", "ShortConvolution", "convolution_refusal"]

_THREADS = 128
_WIDE = 8  # channels of a thread
_TILE = 16  # rows of a thread
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
        self._prompts = kernels.function("convolve_prompts", "PiiPPPPPPPiiP")
        self._keep = kernels.function("keep_inputs", "PiiPPPPP")
        self._drawn = kernels.function("convolve_drawn", "PiiPPPPPPPP")

    @staticmethod
    def source(kernel: int, *, short: bool = False) -> Source:
        """The kernel file and its options."""
        return source_of("convolution", f"-DTAPS={kernel}", f"-DSHORT={int(short)}")

    def __call__(
        self, x: Buffer, channels: int, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue it for the first columns of x; what rows of out hold behind `channels` stays.

        x    elements (rows, stride): `channels` of each row, or, short, b, c and x of so many each
        out  float (rows, channels): SiLU of the convolution; or, short, elements: c times the convolution
        """
        across = -(-channels // (_WIDE * _THREADS))
        read = x.address, x.shape[1], channels
        of = weights.convolution.address, weights.convolution_bias.address, states.inputs
        block = (_THREADS, 1, 1)
        if pieces.prompts.count:
            many, rows = pieces.prompts, pieces.prompts.rows
            self._prompts.of(rows)(
                (across, -(-rows // _TILE)), block, *read, *of, *many.addresses, many.count, rows, out.address
            )
            self._keep.of(rows)((across, many.count), block, *read, states.inputs, *many.addresses)
        if pieces.drawn.count:
            drawn = pieces.drawn
            self._drawn.of(drawn.count)(
                (across, drawn.count), block, *read, *of, *drawn.addresses, out.address
            )


class ShortConvolution:
    """The mixer of LFM2: out = c * convolution(b * x), where b, c and x are a row's columns."""

    def __init__(self, device: Device, mixer: ShortConv) -> None:
        self._width = mixer.width
        self._convolution = Convolution(device, mixer.kernel, short=True)

    @staticmethod
    def sources(mixer: ShortConv) -> list[Source]:
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
        """Queue it as `Mixer` says; there are no controls."""
        self._convolution(x, self._width, weights, states, pieces, out)


def columns_from(x: Buffer, column: int) -> Buffer:
    """The same rows, without the columns before that one."""
    return replace(x, address=x.address + column * x.dtype.itemsize)
