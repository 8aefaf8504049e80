"""Readers for families with mixtures of experts: which layers have them, and of what kind they are."""

from collections.abc import Callable, Mapping
from typing import Final

from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.spec import Activation, Experts, FeedForward, RouterScores

__all__ = ["experts_of", "leading_dense", "networks"]

Network = FeedForward | Experts

_SCORES: Final[Mapping[int, RouterScores]] = {
    1: RouterScores.SOFTMAX,
    2: RouterScores.SIGMOID,
    3: RouterScores.SOFTMAX_OF_CHOSEN,
}
"""By the number that files have for them."""
_MOST: Final = 1 << 16  # experts: models have up to 512


def networks(keys: Keys, experts: Callable[[int], Experts], dense: Callable[[int], bool]) -> list[Network]:
    """The feed-forward network or the experts of each layer.

    experts  reads those of a layer
    dense    says which layers have none
    """
    kinds = [dense(index) for index in range(keys.block_count())]
    for index, without in enumerate(kinds):
        router = f"blk.{index}.ffn_gate_inp.weight"
        if without and keys.has_tensor(router):
            keys.file.fail(f"tensor {router}: layer {index} is one without experts, as the metadata has it")
    plain = [index for index, without in enumerate(kinds) if without]
    network = keys.feed_forward(layers=plain) if plain else None
    return [
        network if without and network is not None else experts(index) for index, without in enumerate(kinds)
    ]


def leading_dense(keys: Keys) -> int:
    """Return how many of the first layers have no experts."""
    most = keys.block_count()
    return keys.file.integer(keys.name("leading_dense_block_count"), minimum=0, maximum=most, default=0)


def experts_of(
    keys: Keys, index: int, *, activation: Activation = Activation.SILU, gated: bool = True,
    scores: RouterScores = RouterScores.SOFTMAX, normalise: bool = True,
) -> Experts:  # fmt: skip
    """The experts of layer `index`; `scores` and `normalise` where the file does not say them."""
    file, block = keys.file, f"blk.{index}."
    count, used = _counts(keys)
    fused = keys.has_tensor(f"{block}ffn_gate_up_exps.weight")
    kind = file.integer(keys.name("expert_gating_func"), default=0)
    if kind not in (0, *_SCORES):
        file.fail(
            f"{keys.name('expert_gating_func')}: {kind} is not supported; supported are 1 (softmax), 2 "
            "(sigmoid) and 3 (softmax of the chosen)"
        )
    groups, groups_used = _groups(keys, count, used)
    latent = file.integer(keys.name("moe_latent_size"), minimum=0, maximum=1 << 24, default=0) or None
    biased = f"{block}ffn_gate_up_exps.bias" if fused else f"{block}ffn_up_exps.bias"
    shared = _shared(keys, block, activation, gated=gated)
    return Experts(
        count=count,
        used=used,
        width=_width(keys, f"{block}ffn_down_exps.weight"),
        activation=activation,
        gated=gated,
        scores=_SCORES.get(kind, scores),
        selection_bias=keys.has_tensor(f"{block}exp_probs_b.bias"),
        groups=groups,
        groups_used=groups_used,
        normalise=file.boolean(keys.name("expert_weights_norm"), default=normalise),
        scale=keys.optional("expert_weights_scale") or 1.0,
        router_bias=keys.has_tensor(f"{block}ffn_gate_inp.bias"),
        bias=keys.has_tensor(biased),
        expert_scales=tuple(
            part for part in ("gate", "up", "down") if keys.has_tensor(f"{block}ffn_{part}_exps.scale")
        ),
        fused=fused,
        latent=latent,
        shared=shared,
        shared_gated=shared is not None and keys.has_tensor(f"{block}ffn_gate_inp_shexp.weight"),
    )


def _counts(keys: Keys) -> tuple[int, int]:
    """Experts of a layer, and how many a token goes through."""
    file, names = keys.file, (keys.name("expert_count"), keys.name("expert_used_count"))
    keys.reads("expert_count")
    count = file.integer(names[0], minimum=1, maximum=_MOST)
    if file.is_array(names[1]):
        given = set(file.integers(names[1])) - {0}
        if len(given) != 1:
            file.fail(f"{names[1]}: layers that use different numbers of experts are not supported")
        used = given.pop()
    else:
        used = file.integer(names[1], minimum=1, maximum=_MOST)
    if not 1 <= used <= count:
        file.fail(
            f"{names[1]}: is {used}, but {names[0]} is {count}: a token cannot go through more than all"
        )
    return count, used


def _groups(keys: Keys, count: int, used: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may use; (1, 1): there are none."""
    file, names = keys.file, (keys.name("expert_group_count"), keys.name("expert_group_used_count"))
    groups = file.integer(names[0], minimum=0, maximum=_MOST, default=1) or 1
    if groups == 1:
        return 1, 1
    taken = file.integer(names[1], minimum=1, maximum=groups)
    if count % groups:
        file.fail(f"{names[0]}: {groups} does not divide {keys.name('expert_count')}, {count}")
    if taken * (count // groups) < used:
        file.fail(
            f"{names[1]}: {taken} groups have fewer experts than {keys.name('expert_used_count')}, {used}"
        )
    return (1, 1) if taken == groups else (groups, taken)


def _width(keys: Keys, down: str) -> int:
    info = keys.file.tensors.get(down)
    if info is None:
        keys.file.fail(f"tensor {down}: is missing")
    if len(info.shape) != 3:
        keys.file.fail(f"tensor {down}: has shape {info.shape}, expected three dimensions")
    key = "expert_feed_forward_length"
    declared = keys.file.integer(keys.name(key), minimum=0, maximum=1 << 24, default=0)
    if declared not in (0, info.shape[2]):
        keys.file.fail(f"{keys.name(key)}: is {declared}, but {down} has {info.shape[2]} columns")
    return info.shape[2]


def _shared(keys: Keys, block: str, activation: Activation, *, gated: bool) -> FeedForward | None:
    info = keys.file.tensors.get(f"{block}ffn_up_shexp.weight")
    if info is None:
        return None
    return FeedForward(width=info.shape[0], activation=activation, gated=gated)
