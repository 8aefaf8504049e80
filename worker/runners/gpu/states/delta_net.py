"""Gated delta nets (Qwen3.5 and later)."""

from nightmill.worker.model.spec import GatedDeltaNet
from nightmill.worker.runners.gpu.device.device import Device, aligned
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.chunks import DeltaChunks, controls_of
from nightmill.worker.runners.gpu.states.convolution import Convolution, columns_from, convolution_refusal
from nightmill.worker.runners.gpu.states.operands import LayerStates, MixerWeights, StepPieces
from nightmill.worker.runners.gpu.states.recurrent import Recurrent

__all__ = ["DeltaNet"]

_SIZES = (32, 64, 96, 128)  # of keys, and of values
_NORM_WARPS = 8  # of a block, each with a head


class DeltaNet:
    """Launches `convolution.cu`, `delta_recurrent.cu`, `delta_chunked.cu` and `gated_norm.cu`.

    work  the address of `workspace` bytes for steps of up to so many rows, which layers may share
    """

    def __init__(self, device: Device, mixer: GatedDeltaNet, work: int, rows: int) -> None:
        self._mixer = mixer
        self._work = Buffer(work, (rows, mixer.convolved), FLOAT)
        self._convolution = Convolution(device, mixer.kernel)
        self._recurrent = Recurrent(
            device, source_of("delta_recurrent", *_sizes(mixer)), "delta_recurrent", "PPiPiPPPfPPPPPiiiP",
            rows=mixer.key_dim, columns=mixer.value_dim, heads=mixer.value_heads,
        )  # fmt: skip
        self._chunks = DeltaChunks(
            device, source_of("delta_chunked", *_sizes(mixer)), keys=mixer.key_dim, values=mixer.value_dim,
            key_heads=mixer.key_heads, heads=mixer.value_heads, records=work + _rows_bytes(mixer, rows),
        )  # fmt: skip
        self._norm = KernelPairs(device, source_of("gated_norm")).function("norm_then_gate", "PiPiPfPPPPiiiP")

    @staticmethod
    def sources(mixer: GatedDeltaNet) -> list[Source]:
        """List the kernel files for a mixer; those that take longest to compile first."""
        sized = [source_of(name, *_sizes(mixer)) for name in ("delta_chunked", "delta_recurrent")]
        return [*sized, Convolution.source(mixer.kernel), source_of("gated_norm")]

    @staticmethod
    def refusal(mixer: GatedDeltaNet) -> str | None:
        """Return what of a mixer no kernel takes, or None."""
        for name, size in (("keys", mixer.key_dim), ("values", mixer.value_dim)):
            if size not in _SIZES:
                return f"{name} of {size} (32, 64, 96 or 128)"
        if mixer.norm.centred or mixer.norm.bias:
            return "a norm of heads that is not a plain RMS norm"
        return convolution_refusal(mixer.kernel, mixer.convolved)

    @staticmethod
    def workspace(mixer: GatedDeltaNet, rows: int) -> int:
        """Bytes of device memory that steps of up to so many rows need beside activations."""
        return _rows_bytes(mixer, rows) + DeltaChunks.bytes(rows, mixer.value_heads)

    def __call__(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue it as `Mixer` says."""
        self._convolution(x, self._mixer.convolved, weights, states, pieces, self._work)
        self.recur(x, controls, weights, states, pieces, out)

    def recur(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue what follows on the convolution: prompts first, after which drawn tokens may come."""
        mixer, work, heads = self._mixer, self._work.address, self._mixer.value_heads
        steering = controls_of(controls)
        drawn, prompts = pieces.drawn, pieces.prompts
        if prompts.count:
            own = columns_from(x, mixer.convolved + mixer.values)
            self._chunks(
                work, (own.address, x.shape[1], *steering),
                (weights.time_step_bias.address, weights.decay.address), states.matrix, prompts,
            )  # fmt: skip
            self._norm.of(prompts.rows)(
                (-(-heads // _NORM_WARPS), prompts.rows), (32 * _NORM_WARPS, 1, 1),
                columns_from(self._work, 2 * mixer.keys).address, mixer.convolved,
                columns_from(x, mixer.convolved).address, x.shape[1], weights.norm.address, mixer.norm.eps,
                *prompts.addresses, 1, heads, mixer.value_dim, out.address,
            )  # fmt: skip
        if drawn.count:
            self._recurrent(
                drawn.count, work, x.address, x.shape[1], *steering, weights.time_step_bias.address,
                weights.decay.address, weights.norm.address, mixer.norm.eps, states.matrix, *drawn.addresses,
                drawn.count, heads, mixer.key_heads, out.address,
            )  # fmt: skip


def _sizes(mixer: GatedDeltaNet) -> tuple[str, str]:
    return f"-DKEY_DIM={mixer.key_dim}", f"-DVALUE_DIM={mixer.value_dim}"


def _rows_bytes(mixer: GatedDeltaNet, rows: int) -> int:
    """Bytes of what the convolution leaves."""
    return aligned(rows * mixer.convolved * FLOAT.itemsize)
