"""Gated delta nets (Qwen3.5 and later)."""

from nightmill.worker.model.spec import GatedDeltaNet
from nightmill.worker.runners.gpu.device.arena import aligned
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.chunks import DeltaChunks, controls_of, delta_sizes
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
        recurrent = self._recurrent_source(mixer)
        sizes = {"rows": mixer.key_dim, "columns": mixer.value_dim}
        arguments = "PPiPPPiPPPfPPPPPiiiP"
        self._recurrent = Recurrent(
            device, recurrent, "delta_recurrent", arguments, **sizes, heads=mixer.value_heads
        )
        self._fused = Recurrent(
            device, recurrent, "delta_recurrent_fused", arguments, **sizes, heads=mixer.key_heads,
            turns=mixer.value_heads // mixer.key_heads,
        )  # fmt: skip
        self._chunks = DeltaChunks(device, mixer, work + _rows_bytes(mixer, rows))
        self._norm = KernelPairs(device, source_of("gated_norm")).function("norm_then_gate", "PiPiPfPPPPiiiP")

    @staticmethod
    def sources(mixer: GatedDeltaNet, *, hopper: bool = False) -> list[Source]:
        """List the kernel files for a mixer; those that take longest to compile first."""
        of_chunks = DeltaChunks.sources(mixer, hopper=hopper)
        return [
            *of_chunks,
            DeltaNet._recurrent_source(mixer),
            Convolution.source(mixer.kernel),
            source_of("gated_norm"),
        ]

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
        """Queue it as `Mixer` says: prompts first, since drawn tokens of a step may come after one's end."""
        channels, keys, convolution = self._mixer.convolved, self._mixer.keys, self._convolution
        convolution.prompts(x, channels, weights, states, pieces.prompts, self._work, first=2 * keys)
        self.recur(x, controls, weights, states, StepPieces(prompts=pieces.prompts), out)
        convolution.keep(x, channels, states, pieces.prompts)
        if not self._fuses(pieces.drawn.count):
            convolution.drawn(x, channels, weights, states, pieces.drawn, self._work)
        self.recur(x, controls, weights, states, StepPieces(drawn=pieces.drawn), out)

    def recur(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue what follows on the convolution, or has it inside."""
        mixer, work, heads = self._mixer, self._work.address, self._mixer.value_heads
        steering = controls_of(controls)
        drawn, prompts = pieces.drawn, pieces.prompts
        if drawn.count:
            recurrent = self._fused if self._fuses(drawn.count) else self._recurrent
            recurrent(
                drawn.count, work, x.address, x.shape[1], states.inputs, weights.convolution.address,
                *steering, weights.time_step_bias.address, weights.decay.address, weights.norm.address,
                mixer.norm.eps, states.matrix, *drawn.addresses, drawn.count, heads, mixer.key_heads,
                out.address,
            )  # fmt: skip
        if prompts.count:
            self._chunks(x, steering, weights, states, work, prompts)
            self._norm.of(prompts.rows)(
                (prompts.rows, -(-heads // _NORM_WARPS)), (32 * _NORM_WARPS, 1, 1),
                columns_from(self._work, 2 * mixer.keys).address, mixer.convolved,
                columns_from(x, mixer.convolved).address, x.shape[1], weights.norm.address, mixer.norm.eps,
                *prompts.addresses, 1, heads, mixer.value_dim, out.address,
            )  # fmt: skip

    def _fuses(self, drawn: int) -> bool:
        """Return whether so many pieces are convolved in the recurrence.

        Its blocks have all value heads of a key head, whose number may divide less well among them: 5% more
        is what the launch and the bytes of a convolution cost at least.
        """
        return 20 * self._fused.rounds(drawn) <= 21 * self._recurrent.rounds(drawn)

    @staticmethod
    def _recurrent_source(mixer: GatedDeltaNet) -> Source:
        return source_of("delta_recurrent", *delta_sizes(mixer), f"-DTAPS={mixer.kernel}")


def _rows_bytes(mixer: GatedDeltaNet, rows: int) -> int:
    """Bytes of what the convolution leaves."""
    return aligned(rows * mixer.convolved * FLOAT.itemsize)
