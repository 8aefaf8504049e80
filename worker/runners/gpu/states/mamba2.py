"""Mamba-2 (Granite 4, Nemotron)."""

from nightmill.worker.model.spec import Mamba2
from nightmill.worker.runners.gpu.device.arena import aligned
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.states.chunks import MambaChunks, controls_of, mamba_sizes
from nightmill.worker.runners.gpu.states.convolution import Convolution, columns_from, convolution_refusal
from nightmill.worker.runners.gpu.states.operands import LayerStates, MixerWeights, StepPieces
from nightmill.worker.runners.gpu.states.recurrent import Recurrent

__all__ = ["Mamba"]

_HEAD_DIMS = (32, 64, 80, 96, 128)
_STATE_SIZES = (16, 32, 64, 96, 128, 256)


class Mamba:
    """Launches `convolution.cu`, `mamba_recurrent.cu`, `mamba_chunked.cu` and `gated_norm.cu`.

    work  the address of `workspace` bytes for steps of up to so many rows, which layers may share
    """

    def __init__(self, device: Device, mixer: Mamba2, work: int, rows: int) -> None:
        self._mixer = mixer
        self._work = Buffer(work, (rows, mixer.convolved), FLOAT)
        self._convolution = Convolution(device, mixer.kernel)
        self._recurrent = Recurrent(
            device, source_of("mamba_recurrent", *mamba_sizes(mixer)), "mamba_recurrent", "PPiPiPPPPPPPPiii",
            rows=mixer.state_size, columns=mixer.head_dim, heads=mixer.heads,
        )  # fmt: skip
        self._chunks = MambaChunks(device, mixer, work + _rows_bytes(mixer, rows), rows)
        self._norm = KernelPairs(device, source_of("gated_norm")).function("gate_then_norm", "PiPiPfPPPPiiiP")

    @staticmethod
    def sources(mixer: Mamba2, *, hopper: bool = False) -> list[Source]:
        """List the kernel files for a mixer; those that take longest to compile first."""
        of_chunks = MambaChunks.sources(mixer, hopper=hopper)
        recurrent = source_of("mamba_recurrent", *mamba_sizes(mixer))
        return [*of_chunks, recurrent, Convolution.source(mixer.kernel), source_of("gated_norm")]

    @staticmethod
    def refusal(mixer: Mamba2) -> str | None:
        """Return what of a mixer no kernel takes, or None."""
        if mixer.head_dim not in _HEAD_DIMS:
            return f"heads of {mixer.head_dim} with a state ({', '.join(map(str, _HEAD_DIMS))})"
        if mixer.state_size not in _STATE_SIZES:
            return f"a state of {mixer.state_size} rows ({', '.join(map(str, _STATE_SIZES))})"
        if mixer.norm.centred or mixer.norm.bias:
            return "a norm of groups that is not a plain RMS norm"
        return convolution_refusal(mixer.kernel, mixer.convolved)

    @staticmethod
    def workspace(mixer: Mamba2, rows: int) -> int:
        """Bytes of device memory that steps of up to so many rows need beside activations."""
        return _rows_bytes(mixer, rows) + MambaChunks.bytes(rows, mixer.heads, mixer.groups)

    def __call__(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue it as `Mixer` says: prompts first, since drawn tokens of a step may come after one's end."""
        inner, channels = columns_from(x, self._mixer.inner), self._mixer.convolved
        convolution = self._convolution
        convolution.prompts(inner, channels, weights, states, pieces.prompts, self._work)
        convolution.keep(inner, channels, states, pieces.prompts)
        convolution.drawn(inner, channels, weights, states, pieces.drawn, self._work)
        self.recur(x, controls, weights, states, pieces, out)

    def recur(
        self, x: Buffer, controls: Buffer, weights: MixerWeights, states: LayerStates, pieces: StepPieces,
        out: Buffer,
    ) -> None:  # fmt: skip
        """Queue what follows on the convolution: prompts first, after which drawn tokens may come."""
        mixer, work, heads, groups = self._mixer, self._work, self._mixer.heads, self._mixer.groups
        own = columns_from(x, mixer.inner + mixer.convolved)
        steering = own.address, x.shape[1], *controls_of(controls)
        small = weights.time_step_bias.address, weights.decay.address, weights.skip.address
        drawn, prompts = pieces.drawn, pieces.prompts
        if prompts.count:
            self._chunks(work.address, steering, small, states.matrix, prompts)
        if drawn.count:
            self._recurrent(
                drawn.count, work.address, *steering, *small, states.matrix, *drawn.addresses, drawn.count,
                heads, groups,
            )  # fmt: skip
        for some, rows, whole in ((drawn, drawn.count, 0), (prompts, prompts.rows, 1)):
            if some.count:
                self._norm.of(rows)(
                    (rows, groups), (256, 1, 1), work.address, mixer.convolved, x.address, x.shape[1],
                    weights.norm.address, mixer.norm.eps, *some.addresses, whole, groups,
                    mixer.inner // groups, out.address,
                )  # fmt: skip


def _rows_bytes(mixer: Mamba2, rows: int) -> int:
    """Bytes of what the convolution leaves."""
    return aligned(rows * mixer.convolved * FLOAT.itemsize)
