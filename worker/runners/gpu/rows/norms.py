"""The norms of the residual stream."""

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.weights.layout import NormWeight

__all__ = ["RmsNorm"]

_MOST = 32_768  # elements of a row


class RmsNorm:
    """Launches `rms_norm.cu`."""

    def __init__(self, device: Device) -> None:
        kernels = KernelPairs(device, source_of("rms_norm"))
        self._kernels = {n: kernels.function(f"rms_norm_{n}", "PPPif") for n in (1, 2, 4)}

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What it is compiled from."""
        return [source_of("rms_norm")]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """What of a model it does not take."""
        width = spec.width
        return f"a width of {width} (multiples of 8 up to {_MOST})" if width % 8 or width > _MOST else None

    def __call__(self, x: Buffer, norm: NormWeight, out: Buffer, rows: int) -> None:
        """Queue out (rows, width) half = norm of x (rows, width) float."""
        if rows:
            width = x.shape[1]
            chunks = width // 8  # of 8 values, of which a thread has 1, 2 or 4
            pieces = 1 if chunks <= 256 else 2 if chunks <= 512 else 4
            block = (-(-chunks // (32 * pieces)) * 32, 1, 1)
            self._kernels[pieces].of(rows)(
                (rows, 1), block, x.address, norm.weight.address, out.address, width, norm.eps
            )
