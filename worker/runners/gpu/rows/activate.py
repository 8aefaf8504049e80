"""Activations between matrices, if no product has them inside, and the gates of attention."""

from nightmill.worker.model.spec import Activation, FeedForward, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["COMPUTED", "Activate"]

_KERNELS = {
    (Activation.SILU, True): "swiglu", (Activation.GELU, True): "geglu",
    (Activation.SILU, False): "silu", (Activation.GELU, False): "gelu",
    (Activation.GELU_ERF, True): "geglu_erf", (Activation.GELU_ERF, False): "gelu_erf",
    (Activation.RELU_SQUARED, True): "reglu_squared", (Activation.RELU_SQUARED, False): "relu_squared",
}  # fmt: skip


COMPUTED = frozenset(activation for activation, _ in _KERNELS)
"""Activations that there are kernels of."""


class Activate:
    """Launches `activate.cu`."""

    def __init__(self, device: Device) -> None:
        kernels = KernelPairs(device, source_of("activate"))
        self._kernels = {which: kernels.function(name, "PPPii") for which, name in _KERNELS.items()}
        self._open = kernels.function("open_gates", "PPi")

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("activate")]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the activation or the width of a model that it does not take, or None."""
        networks = [one for layer in spec.layers if isinstance(one := layer.feed_forward, FeedForward)]
        networks += [experts.shared for experts in spec.experts if experts.shared is not None]
        if other := next((one.activation for one in networks if one.activation not in COMPUTED), None):
            return f"the activation {other}"
        odd = next((one.width for one in networks if one.width % 8), None)
        return None if odd is None else f"an FFN width of {odd} (multiples of 8)"

    def __call__(
        self, inner: Buffer, out: Buffer, rows: int, activation: Activation = Activation.SILU,
        *, gated: bool = True, bias: Buffer = ABSENT,
    ) -> None:  # fmt: skip
        """Queue inner (rows, 2 F) -> out (rows, F) elements: the activation of gate, times up.

        Without a gate, inner is (rows, F), and out its activation. `bias` is added to inner first.
        """
        if rows:
            width = out.shape[1]
            self._kernels[activation, gated].of(rows)(
                blocks_for(rows * width // 8), (256, 1, 1), inner.address, bias.address, out.address, rows,
                width,
            )  # fmt: skip

    def open_gates(self, mixed: Buffer, gates: Buffer, rows: int) -> None:
        """Queue mixed (rows, width) elements to be multiplied by the sigmoids of gates (rows, width)."""
        if chunks := rows * mixed.shape[1] // 8:
            self._open.of(rows)(blocks_for(chunks), (256, 1, 1), mixed.address, gates.address, chunks)
