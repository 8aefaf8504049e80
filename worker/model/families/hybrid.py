"""Readers for families of which some layers have no attention: what a layer has, and mixers with states."""

from collections.abc import Mapping, Sequence
from typing import Final

from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.spec import GatedDeltaNet, Mamba2, Norm

__all__ = ["attention_layers", "check_kinds", "delta_net", "kinds_by_heads", "mamba2"]

_FURTHEST: Final = 64  # tokens of a convolution: models have 3 or 4


def kinds_by_heads(keys: Keys, mixer: str, tensor: str) -> list[str]:
    """For each layer "attention", or `mixer` where it has no KV heads, and then the tensor of that name."""
    heads = keys.by_layer("attention.head_count_kv")
    kinds = ["attention" if count else mixer for count in heads]
    check_kinds(keys, kinds, {"attention": "attn_output.weight", mixer: tensor}, "attention.head_count_kv")
    return kinds


def check_kinds(keys: Keys, kinds: Sequence[str], tensors: Mapping[str, str], said_by: str) -> None:
    """Fail where a layer is of another kind than its tensors say.

    tensors  for each kind, one that layers of it have, and others lack
    said_by  the key that says which layer is of which kind
    """
    for index, kind in enumerate(kinds):
        for other, tensor in tensors.items():
            name = f"blk.{index}.{tensor}"
            if (there := keys.has_tensor(name)) != (kind == other):
                keys.file.fail(
                    f"{keys.name(said_by)}: makes layer {index} one of {kind}, but the file "
                    f"{'has' if there else 'lacks'} {name}"
                )


def attention_layers(keys: Keys, kinds: Sequence[str], said_by: str) -> list[int]:
    """The indices of the layers with attention; fails where there are none."""
    layers = [index for index, kind in enumerate(kinds) if kind == "attention"]
    if not layers:
        keys.file.fail(f"{keys.name(said_by)}: leaves no layer with attention, which is not supported")
    return layers


def delta_net(keys: Keys, norm: Norm) -> GatedDeltaNet:
    """The gated delta net that all such layers have."""
    key_heads, value_heads = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    _divides(keys, "ssm.time_step_rank", value_heads, "ssm.group_count", key_heads)
    _divides(keys, "ssm.inner_size", inner, "ssm.time_step_rank", value_heads)
    return GatedDeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.size("ssm.state_size"),
        value_dim=inner // value_heads,
        kernel=_kernel(keys),
        norm=norm,
    )


def mamba2(keys: Keys, norm: Norm, layers: Sequence[int]) -> Mamba2:
    """The Mamba-2 that these layers have."""
    heads, groups, inner = (
        keys.size(f"ssm.{key}") for key in ("time_step_rank", "group_count", "inner_size")
    )
    _divides(keys, "ssm.inner_size", inner, "ssm.time_step_rank", heads)
    _divides(keys, "ssm.time_step_rank", heads, "ssm.group_count", groups)
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_size=keys.size("ssm.state_size"),
        kernel=_kernel(keys),
        norm=norm,
        convolution_bias=all(keys.has_tensor(f"blk.{index}.ssm_conv1d.bias") for index in layers),
    )


def _kernel(keys: Keys) -> int:
    return keys.file.integer(keys.name("ssm.conv_kernel"), minimum=1, maximum=_FURTHEST)


def _divides(keys: Keys, key: str, size: int, by: str, parts: int) -> None:
    if size % parts:
        keys.file.fail(f"{keys.name(by)}: {parts} does not divide {keys.name(key)}, {size}")
