"""SwiGLU by itself, where no product has it inside."""

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["SwiGlu"]


class SwiGlu:
    """Launches `swiglu.cu`."""

    def __init__(self, device: Device) -> None:
        self._kernel = KernelPairs(device, source_of("swiglu")).function("swiglu", "PPii")

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What it is compiled from."""
        return [source_of("swiglu")]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """What of a model it does not take."""
        odd = next((layer.feed_forward.width for layer in spec.layers if layer.feed_forward.width % 8), None)
        return None if odd is None else f"an FFN width of {odd} (multiples of 8)"

    def __call__(self, gate_up: Buffer, out: Buffer, rows: int) -> None:
        """Queue silu(gate) * up of gate_up (rows, 2 F) half -> out (rows, F) half."""
        if rows:
            width = out.shape[1]
            grid = blocks_for(rows * width // 8)
            self._kernel.of(rows)(grid, (256, 1, 1), gate_up.address, out.address, rows, width)
