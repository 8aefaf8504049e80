"""Layers that most families with experts share: attention, then experts, with a norm before each."""

from collections.abc import Callable

from nightmill.worker.model.families.experts import networks
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.spec import Attention, Experts, LatentAttention, LayerSpec

__all__ = ["mixture_layers"]


def mixture_layers(
    keys: Keys, mixer: Attention | LatentAttention, experts: Callable[[int], Experts],
    *, dense: Callable[[int], bool] = lambda _: False, norm_name: str = "ffn_norm",
) -> list[LayerSpec]:  # fmt: skip
    """All layers; `experts` reads those of a layer, `dense` says which have a plain network instead.

    norm_name  that of the norm before experts, in the file
    """
    norm = keys.norm()
    return [
        LayerSpec(
            attention_norm=norm,
            mixer=mixer,
            feed_forward_norm=norm,
            feed_forward_norm_name=norm_name,
            feed_forward=network,
        )
        for network in networks(keys, experts, dense)
    ]
