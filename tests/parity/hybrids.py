"""What llama.cpp's converter does with parameters of families whose layers have states."""

from typing import Any

import numpy as np

from tests.parity.cases import Array

__all__ = ["FAMILIES", "converted"]

FAMILIES = {
    "qwen35", "lfm2", "granitehybrid", "nemotron_h", "qwen35moe", "qwen3next", "lfm2moe", "nemotron_h_moe",
}  # fmt: skip


def converted(
    config: Any, family: str, key: str, array: Array, mapped: str | None
) -> list[tuple[str, Array]]:
    """The tensors of a file for the parameter `key`, which gguf's table calls `mapped`."""
    block = f"blk.{key.split('.')[2]}." if ".layers." in key else ""
    if key.endswith("shared_mlp.input_linear.weight"):  # Granite's gate and up
        gate, up = np.split(array, 2)
        return [(f"{block}ffn_gate.weight", gate), (f"{block}ffn_up.weight", up)]
    if key.endswith("shared_mlp.output_linear.weight"):
        return [(f"{block}ffn_down.weight", array)]
    name = f"{block}ssm_dt.bias" if key.endswith(".dt_bias") else mapped
    assert name is not None, key
    if ".conv1d.weight" in key or ".conv.conv.weight" in key:
        array = array[:, 0]
    if key.endswith(".A_log"):
        array = -np.exp(array)
    if family.startswith("qwen3"):
        return [(name, _qwen35(config, key, array))]
    if key.endswith((".A_log", ".D")):
        array = array[:, None]
    if name.endswith("ssm_norm.weight"):
        groups = config.mamba_n_groups if family == "granitehybrid" else config.n_groups
        array = array.reshape(groups, -1)
    return [(name, array)]


def _qwen35(config: Any, key: str, array: Array) -> Array:
    """All norms but the delta net's get 1 added; value heads go by the key head that they do not share."""
    if key.endswith("norm.weight") and "linear_attn" not in key:
        return array + 1
    if "linear_attn" not in key or key.endswith("norm.weight") or config.model_type == "qwen3_next":
        return array
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = np.arange(heads).reshape(keys, -1).T.reshape(-1)
    queries = 2 * keys * config.linear_key_head_dim

    def reordered(rows: Array) -> Array:
        return rows.reshape(heads, -1, *rows.shape[1:])[order].reshape(rows.shape)

    if "in_proj_qkv" in key or "conv1d" in key:
        return np.concatenate([array[:queries], reordered(array[queries:])])
    if "out_proj" in key:
        return np.ascontiguousarray(reordered(np.ascontiguousarray(array.T)).T)
    return reordered(array)
