"""The choice of kernels for layers with a state: by the kind of the mixer."""

from collections.abc import Iterator
from typing import Any

from nightmill.worker.model.spec import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    ModelSpec,
    ShortConv,
)
from nightmill.worker.model.spec import Mixer as MixerSpec
from nightmill.worker.runners.gpu.device.chosen import NamedGpu
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.states.chunks import DeltaChunks, MambaChunks
from nightmill.worker.runners.gpu.states.convolution import ShortConvolution
from nightmill.worker.runners.gpu.states.delta_net import DeltaNet
from nightmill.worker.runners.gpu.states.mamba2 import Mamba
from nightmill.worker.runners.gpu.states.operands import Mixer

__all__ = ["StateMixers", "state_mixer"]

_LAUNCHERS: dict[type, Any] = {ShortConv: ShortConvolution, GatedDeltaNet: DeltaNet, Mamba2: Mamba}


class StateMixers:
    """The launchers of all mixers with states that a model has."""

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [
            source
            for mixer in _mixers(spec)
            for source in _LAUNCHERS[type(mixer)].sources(mixer, hopper=hopper)
        ]

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the mixer of a model, or the size of one, that no kernel takes, or None."""
        for mixer in _mixers(spec):
            reason: str | None = _LAUNCHERS[type(mixer)].refusal(mixer)
            if reason is not None:
                return reason
        return None

    @staticmethod
    def refusal_on(spec: ModelSpec, gpu: NamedGpu) -> str | None:
        """Return why a GPU has too little shared memory for the states of a model, or None."""
        for mixer in _mixers(spec):
            least = 0
            if isinstance(mixer, GatedDeltaNet):
                least = DeltaChunks.least_shared(mixer)
            elif isinstance(mixer, Mamba2):
                least = MambaChunks.least_shared(mixer)
            if least > gpu.block_shared:
                return (
                    f"states of this model take {least:,} bytes of shared memory and a block of {gpu.name} "
                    f"has {gpu.block_shared:,}; `--reference` generates without a GPU"
                )
        return None

    @staticmethod
    def workspace(spec: ModelSpec, rows: int) -> int:
        """Bytes of device memory that they share, one layer after the other, for steps of so many rows."""
        needing = (mixer for mixer in _mixers(spec) if not isinstance(mixer, ShortConv))
        return max((_LAUNCHERS[type(mixer)].workspace(mixer, rows) for mixer in needing), default=0)


def state_mixer(device: Device, mixer: MixerSpec, work: int, rows: int) -> Mixer:
    """Make the launcher of a mixer with a state, for steps of up to so many rows.

    work  the address of `StateMixers.workspace`, which it may overwrite
    """
    launcher: Mixer
    match mixer:
        case ShortConv():
            launcher = ShortConvolution(device, mixer)
        case GatedDeltaNet():
            launcher = DeltaNet(device, mixer, work, rows)
        case Mamba2():
            launcher = Mamba(device, mixer, work, rows)
        case _:
            raise TypeError(f"{mixer.title} is no mixer with a state")
    return launcher


def _mixers(spec: ModelSpec) -> Iterator[MixerSpec]:
    """The different ones among those of the layers."""
    for mixer in dict.fromkeys(layer.mixer for layer in spec.layers):
        if mixer is not None and not isinstance(mixer, Attention | LatentAttention):
            yield mixer
