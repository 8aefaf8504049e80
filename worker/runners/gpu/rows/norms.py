"""The norms of the residual stream, and what is added to it between them."""

from dataclasses import dataclass

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPair, KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, FP8, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.kinds import layer_kinds
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, NormWeight

__all__ = ["Ending", "Norms", "only_rms_norms", "row_shape"]

_MOST = 32_768  # elements of a row
_PIECES = (1, 2, 4)  # kernels, by the pieces of 8 values that a thread has


@dataclass(frozen=True, slots=True)
class Ending:
    """An addition to the residual stream: x = factor * (x + scale * after(it)), out = before(x).

    factor  a float that is a weight, or ABSENT
    before  None: nothing is written to out; without a weight x is only rounded
    behind  x becomes before(x), too: norms stand behind what is added
    """

    after: NormWeight = NO_NORM
    scale: float = 1.0
    factor: Buffer = ABSENT
    before: NormWeight | None = NO_NORM
    behind: bool = False


class Norms:
    """Launches `rms_norm.cu`, and `residual.cu` for models that have more than RMS norms before products."""

    def __init__(self, device: Device, spec: ModelSpec) -> None:
        rms = KernelPairs(device, source_of("rms_norm"))
        self._rms = _by_pieces(rms, "rms_norm", "PPPif")
        self._rounding = _by_pieces(rms, "rms_norm_fp8", "PPPPif")
        self._any: dict[int, KernelPair] = {}
        if not only_rms_norms(spec):
            residual = KernelPairs(device, source_of("residual"))
            self._any = _by_pieces(residual, "residual", "PPPPfifPPPPfiiPi")

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        names = ["rms_norm"] if only_rms_norms(spec) else ["rms_norm", "residual"]
        return [source_of(name) for name in names]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the width of a model that they do not take, or None."""
        width = spec.width
        return f"a width of {width} (multiples of 8 up to {_MOST})" if width % 8 or width > _MOST else None

    def __call__(self, x: Buffer, norm: NormWeight, out: Buffer, rows: int) -> None:
        """Queue out (rows, width) = norm of x (rows, width) float: elements, or FP8 if it is an RMS norm."""
        if not norm.plain:
            self.add(None, ABSENT, Ending(before=norm), x, out, rows)
        elif rows:
            width = x.shape[1]
            pieces, block = row_shape(width)
            rounds = out.dtype == FP8
            written = (out.address, out.scales) if rounds else (out.address,)
            (self._rounding if rounds else self._rms)[pieces].of(rows)(
                (rows, 1), block, x.address, norm.weight.address, *written, width, norm.eps
            )

    def add(
        self, added: Buffer | None, bias: Buffer, ending: Ending, x: Buffer, out: Buffer, rows: int
    ) -> None:
        """Queue what `ending` says for added + bias.

        added  float (rows, width); None: x stays as it is
        """
        if rows:
            width, after, then = x.shape[1], ending.after, ending.before or NO_NORM
            pieces, block = row_shape(width)
            self._any[pieces].of(rows)(
                (rows, 1), block, 0 if added is None else added.address, bias.address, after.weight.address,
                after.bias.address, after.eps, after.centred, ending.scale, ending.factor.address, x.address,
                then.weight.address, then.bias.address, then.eps, then.centred, ending.behind,
                0 if ending.before is None else out.address, width,
            )  # fmt: skip


def _by_pieces(kernels: KernelPairs, name: str, arguments: str) -> dict[int, KernelPair]:
    return {pieces: kernels.function(f"{name}_{pieces}", arguments) for pieces in _PIECES}


def row_shape(width: int) -> tuple[int, tuple[int, int, int]]:
    """Pieces of a thread, and the block, for a row."""
    chunks = width // 8  # of 8 values
    pieces = 1 if chunks <= 256 else 2 if chunks <= 512 else 4
    return pieces, (-(-chunks // (32 * pieces)) * 32, 1, 1)


def only_rms_norms(spec: ModelSpec) -> bool:
    """Return whether nothing is done between products but RMS norms, without biases."""
    norms = [spec.output_norm, *(layer.attention_norm for layer in spec.layers if layer.mixer is not None)]
    norms += [one.feed_forward_norm for one in spec.layers if one.feed_forward.width and not one.parallel]
    plain = all(norm is not None and not norm.centred and not norm.bias for norm in norms)
    adds = spec.layer_inputs is not None or spec.encoder is not None
    adds = adds or any(Kind.ADDEND in layer_kinds(layer) for layer in spec.layers)
    return plain and not adds
