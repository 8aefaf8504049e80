"""DeepSeek V2 and V3, and GLM-4.7-Flash: latent attention, and experts of which some are shared."""

import math
from dataclasses import replace

from nightmill.worker.model.families.dense import dense_model
from nightmill.worker.model.families.experts import experts_of, leading_dense
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.families.mixture import mixture_layers
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import LatentAttention, ModelSpec, RouterScores

__all__ = ["deepseek2"]

_FLASH = (47, 48), 154_880  # layers and tokens of GLM-4.7-Flash


def deepseek2(keys: Keys) -> ModelSpec:
    """The first layers have no experts."""
    keys.skip_predictors()
    first = leading_dense(keys)
    layers = mixture_layers(
        keys, _attention(keys),
        lambda index: experts_of(keys, index, scores=_scores(keys), normalise=False),
        dense=lambda index: index < first,
    )  # fmt: skip
    return dense_model(keys, *layers)


def _scores(keys: Keys) -> RouterScores:
    """Return the scores of files that do not name them: softmax, but for GLM-4.7-Flash."""
    layers, tokens = _FLASH
    flash = keys.block_count() in layers and keys.vocab() == tokens
    return RouterScores.SIGMOID if flash else RouterScores.SOFTMAX


def _attention(keys: Keys) -> LatentAttention:
    file, fused = keys.file, keys.has_tensor("blk.0.attn_kv_b.weight")
    latent, rotated = keys.size("attention.kv_lora_rank"), keys.size("rope.dimension_count")
    # Files that lack these are from before keys and values were made of the latent in two.
    head, values = (
        keys.size(f"attention.{part}_length{suffix}")
        for suffix in ["_mla" if keys.name("attention.key_length_mla") in file else ""]
        for part in ("key", "value")
    )
    if head <= rotated or rotated % 2:
        file.fail(f"{keys.name('rope.dimension_count')}: {rotated} of the {head} elements of a key")
    rope, stretch = _stretched(keys, keys.rope(RopeStyle.PAIRS, rotated))
    queries = file.integer(keys.name("attention.q_lora_rank"), minimum=0, maximum=1 << 24, default=0)
    return LatentAttention(
        heads=keys.size("attention.head_count"),
        key_dim=head - rotated,
        value_dim=values,
        latent=latent,
        rope=rope,
        norm=keys.norm(),
        query_latent=(queries or None) if not keys.has_tensor("blk.0.attn_q.weight") else None,
        fused=fused,
        scale=stretch**2 / math.sqrt(head),
    )


def _stretched(keys: Keys, rope: Rope) -> tuple[Rope, float]:
    """The rotation, and the factor of whole queries and keys.

    With YaRN models multiply all of a head by 1 + 0.1 m ln(factor), with m their `mscale_all_dim`, and not
    what is rotated alone. Files have 0.1 m as the multiplier.
    """
    multiplier = keys.optional("rope.scaling.yarn_log_multiplier")
    if multiplier is None or rope.scaling.kind != "yarn":
        return rope, 1.0
    scaling = replace(rope.scaling, log_multiplier=0.0, own_magnitude=1.0)
    return replace(rope, scaling=scaling), 1.0 + multiplier * math.log(rope.scaling.factor)
