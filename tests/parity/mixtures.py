"""Models with mixtures of experts for the comparison with transformers, and what the converter does."""

from typing import Any

import numpy as np

from tests.parity.cases import (
    GEMMA4,
    GEMMA4_KEYS,
    PARTLY_ROTATED,
    PROPORTIONAL,
    YARN,
    Array,
    Case,
)  # fmt: skip

__all__ = ["MIXTURES", "converted_experts"]

GLM_KEYS = {
    "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}  # fmt: skip
NEXT = {
    "num_hidden_layers": 3, "head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "partial_rotary_factor": 0.25, "moe_intermediate_size": 72,
    "shared_expert_intermediate_size": 56, "num_experts": 7, "num_experts_per_tok": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
NEXT_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6,
    "ssm.inner_size": 144, "attention.recurrent_layers": [True, False, True], "rope.dimension_count": 8,
    "expert_count": 7, "expert_used_count": 3,
}  # fmt: skip
SEVEN = {"expert_count": 7, "expert_used_count": 3}
MLA = {
    "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 72, "kv_lora_rank": 40,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20, "moe_intermediate_size": 72,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
}  # fmt: skip
MLA_KEYS = {
    "attention.head_count_kv": 1, "attention.q_lora_rank": 72, "attention.kv_lora_rank": 40,
    "attention.key_length": 56, "attention.value_length": 40, "attention.key_length_mla": 40,
    "attention.value_length_mla": 20, "rope.dimension_count": 16, "leading_dense_block_count": 1,
    "expert_count": 8, "expert_used_count": 3,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.6, "attention_multiplier": 0.1,
    "logits_scaling": 4.0, "num_local_experts": 7, "num_experts_per_tok": 3,
}  # fmt: skip
GRANITE_KEYS = SEVEN | {
    "embedding_scale": 12.0, "residual_scale": 0.6, "attention.scale": 0.1, "logit_scale": 4.0,
}  # fmt: skip
MIXTURES = {
    "mixtral": Case(
        "mixtral", {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": None}, SEVEN,
        theta=1e6, tied=False,
    ),
    "qwen3moe": Case(
        "qwen3moe",
        {
            "head_dim": 32, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 72,
            "norm_topk_prob": True,
        },
        SEVEN | {"expert_feed_forward_length": 72}, theta=1e6, tied=False,
    ),
    "qwen35moe": Case(
        "qwen35moe", NEXT, NEXT_KEYS | {"rope.dimension_sections": [2, 1, 1, 0]}, theta=1e7,
    ),
    "qwen3next": Case("qwen3next", NEXT, NEXT_KEYS, theta=1e7),
    "gpt-oss": Case(
        "gpt-oss",
        {
            "head_dim": 32, "num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 40,
            "num_hidden_layers": 4, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        SEVEN
        | {
            "attention.sliding_window": 40, "attention.layer_norm_rms_epsilon": 1e-6,
            "expert_feed_forward_length": 208, "rope.scaling.yarn_beta_fast": 4.0,
            "rope.scaling.yarn_beta_slow": 0.5,
        },
        theta=150.0, tied=False, scaling=YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
    ),
    "gemma4-experts": Case(  # like 26B-A4B: keys are values in layers without a window
        "gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 4, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 72,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        GEMMA4_KEYS
        | SEVEN
        | {
            "expert_feed_forward_length": 72, "attention.head_count_kv": [2, 1, 2, 1],
            "attention.sliding_window_pattern": [True, False] * 2,
        },
        theta=1e6, local_theta=10_000.0, scaling=PROPORTIONAL, factors=PARTLY_ROTATED,
    ),
    "granitemoe": Case("granitemoe", GRANITE, GRANITE_KEYS),
    "granitehybrid-experts": Case(
        "granitehybrid",
        GRANITE
        | {
            "num_hidden_layers": 4, "shared_intermediate_size": 72, "mamba_n_heads": 6, "mamba_n_groups": 1,
            "mamba_d_state": 24,
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        },
        GRANITE_KEYS
        | {
            "ssm.conv_kernel": 4, "ssm.state_size": 24, "ssm.group_count": 1, "ssm.time_step_rank": 6,
            "ssm.inner_size": 192, "attention.head_count_kv": [0, 0, 2, 0], "rope.scaling.finetuned": False,
        },
    ),
    "lfm2moe": Case(
        "lfm2moe",
        {
            "num_hidden_layers": 4, "norm_eps": 1e-6, "conv_L_cache": 4, "num_dense_layers": 1,
            "moe_intermediate_size": 72, "num_experts": 7, "num_experts_per_tok": 3, "use_expert_bias": True,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        SEVEN
        | {
            "attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 4, "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        theta=1e6,
    ),
    "olmoe": Case("olmoe", {"num_experts": 7, "num_experts_per_tok": 3}, SEVEN, tied=False),
    "nemotron_h_moe": Case(
        "nemotron_h_moe",
        {
            "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 2, "ssm_state_size": 24,
            "layer_norm_epsilon": 1e-6, "num_hidden_layers": None, "moe_latent_size": 40,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 72,
            "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 2.5, "n_group": 4,
            "topk_group": 2,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        },
        {
            "ssm.conv_kernel": 4, "ssm.state_size": 24, "ssm.group_count": 2, "ssm.time_step_rank": 6,
            "ssm.inner_size": 120, "attention.head_count_kv": [0, 0, 2, 0, 0],
            "feed_forward_length": [0, 72, 0, 72, 0], "attention.layer_norm_epsilon": 1e-6,
            "moe_latent_size": 40, "expert_count": 8, "expert_used_count": 3, "expert_weights_norm": True,
            "expert_weights_scale": 2.5, "expert_group_count": 4, "expert_group_used_count": 2,
        },
        tied=False,
    ),
    "glm4moe": Case(
        "glm4moe",
        {
            "head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": True,
            "moe_intermediate_size": 72, "n_routed_experts": 7, "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
        },
        SEVEN | GLM_KEYS | {"rope.dimension_count": 16}, tied=False, theta=1e6,
    ),
    "ernie4_5-moe": Case(
        "ernie4_5-moe",
        {
            "moe_intermediate_size": 72, "moe_num_experts": 7, "moe_k": 3, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        SEVEN | {"leading_dense_block_count": 1, "expert_gating_func": 1}, theta=500_000.0,
    ),
    "glm4-flash": Case(
        "glm4-flash", MLA | {"routed_scaling_factor": 1.75, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        MLA_KEYS | GLM_KEYS | {"expert_weights_scale": 1.75}, tied=False, theta=1e6,
    ),
    "deepseek2-lite": Case(
        "deepseek2",
        MLA
        | {
            "q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1,
            "topk_group": 1,
        },
        MLA_KEYS | {"attention.q_lora_rank": None, "rope.scaling.yarn_log_multiplier": 0.0707},
        tied=False, scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek2-groups": Case(
        "deepseek2",
        MLA
        | {
            "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
        MLA_KEYS
        | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 2.0},
        tied=False,
    ),
}  # fmt: skip


def converted_experts(config: Any, case: Case, key: str, array: Array) -> list[tuple[str, Array]] | None:
    """The tensors of a file for a parameter of a layer's experts or latents; None: it is none of these."""
    block = f"blk.{key.split('.')[2]}." if ".layers." in key else ""
    if ".experts." in key:
        return [(f"{block}{name}", tensor) for name, tensor in _experts(case, key, array)]
    if key.endswith(("e_score_correction_bias", "expert_bias")):
        return [(f"{block}exp_probs_b.bias", array.reshape(-1))]
    if key.endswith((".router.scale", ".router.per_expert_scale")):
        part = "ffn_gate_inp" if key.endswith(".router.scale") else "ffn_down_exps"
        return [(f"{block}{part}.scale", array)]
    if key.endswith((".gate.weight", ".router.weight")):
        return [(f"{block}ffn_gate_inp.weight", array)]
    if key.endswith(".router.bias"):
        return [(f"{block}ffn_gate_inp.bias", array)]
    if key.endswith("shared_expert_gate.weight"):
        return [(f"{block}ffn_gate_inp_shexp.weight", array)]
    if ".shared_expert." in key or ".shared_experts." in key:
        part = key.split(".")[-2].removesuffix("_proj")
        return [(f"{block}ffn_{part}_shexp.weight", array)]
    if case.family == "granitehybrid" and ".shared_mlp." in key and config.num_local_experts:
        names = ("gate", "up") if "input_linear" in key else ("down",)
        parts = np.split(array, len(names))
        return [(f"{block}ffn_{name}_shexp.weight", part) for name, part in zip(names, parts, strict=True)]
    if key.endswith(("fc1_latent_proj.weight", "fc2_latent_proj.weight")):
        return [(f"{block}ffn_latent_{'down' if 'fc1' in key else 'up'}.weight", array)]
    if key.endswith(".sinks"):
        return [(f"{block}attn_sinks.weight", array)]
    if key.endswith("kv_b_proj.weight"):
        both = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(both, [config.qk_nope_head_dim], axis=1)
        return [
            (f"{block}attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2))),
            (f"{block}attn_v_b.weight", np.ascontiguousarray(values)),
        ]
    if ".in_proj_qkvz" in key:
        return [(f"{block}{name}", tensor) for name, tensor in _parts_of_heads(config, array)]
    if ".in_proj_ba" in key:
        return [(f"{block}ssm_ba.weight", array)]
    return None


def _experts(case: Case, key: str, array: Array) -> list[tuple[str, Array]]:
    kind = "bias" if key.endswith("_bias") else "weight"
    if case.family == "gpt-oss" and kind == "weight":
        array = np.ascontiguousarray(array.swapaxes(1, 2))
    if "gate_up_proj" not in key:
        return [(f"ffn_{'up' if '.up_proj' in key else 'down'}_exps.{kind}", array)]
    if case.family == "gemma4":
        return [("ffn_gate_up_exps.weight", array)]
    if case.family == "gpt-oss":
        gate, up = array[:, ::2], array[:, 1::2]
    else:
        gate, up = np.split(array, 2, axis=1)
    return [
        (f"ffn_gate_exps.{kind}", np.ascontiguousarray(gate)),
        (f"ffn_up_exps.{kind}", np.ascontiguousarray(up)),
    ]  # fmt: skip


def _parts_of_heads(config: Any, array: Array) -> list[tuple[str, Array]]:
    """Qwen3-Next's rows of each key head (queries, keys, values, gates) as rows of all heads."""
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    shared = config.linear_num_value_heads // config.linear_num_key_heads
    heads = array.reshape(config.linear_num_key_heads, -1, array.shape[1])
    q, k, v, z = np.split(heads, np.cumsum([keys, keys, shared * values]), axis=1)
    qkv = np.concatenate([part.reshape(-1, array.shape[1]) for part in (q, k, v)])
    return [("attn_qkv.weight", qkv), ("attn_gate.weight", z.reshape(-1, array.shape[1]))]
