"""Seed-OSS."""

from dataclasses import replace

from nightmill.worker.model.families.dense import dense_layer, dense_model
from nightmill.worker.model.families.keys import Keys
from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import ModelSpec

__all__ = ["seed_oss"]


def seed_oss(keys: Keys) -> ModelSpec:
    """Qwen2's layers; the file calls the norm before the feed-forward network after the attention."""
    layer = dense_layer(keys, style=RopeStyle.HALVES)
    return dense_model(keys, replace(layer, feed_forward_norm_name="post_attention_norm"))
