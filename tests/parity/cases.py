"""Models of every family for the comparison with transformers: tiny, with what makes the family its own."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.ggufs import byte_vocabulary

Array = npt.NDArray[np.float32]
VOCAB = len(byte_vocabulary().tokens)
SIZES = {
    "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1 + n / 20 for n in range(8)],
    "long_factor": [1 + n / 2 for n in range(8)],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A family's model: what its configuration says beyond SIZES, and which keys the converter writes for it.

    The keys that most families have are not given here; `converted_keys` says them.
    """

    family: str
    options: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    theta: float = 10_000.0
    local_theta: float | None = None
    scaling: dict[str, Any] | None = None
    tied: bool = True
    factors: dict[str, Array] = field(default_factory=dict)  # further tensors


PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
PARTLY_ROTATED = {"rope_freqs.weight": np.array([1.0] * 6 + [1e30] * 18, dtype=np.float32)}
GEMMA4 = {
    "head_dim": 32, "global_head_dim": 48, "sliding_window": 40, "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA4_KEYS = {
    "attention.sliding_window": 40, "final_logit_softcapping": 5.0, "attention.key_length": 48,
    "attention.value_length": 48, "attention.key_length_swa": 32, "attention.value_length_swa": 32,
    "rope.dimension_count": 48, "rope.dimension_count_swa": 32, "rope.freq_base_swa": 10_000.0,
}  # fmt: skip
GEMMA2 = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.5, "sliding_window": 40}
CASES = {
    "qwen2": Case("qwen2", {}, theta=1e6),
    "qwen2-seven-to-one": Case("qwen2", {"num_attention_heads": 14, "hidden_size": 112}, theta=1e6),
    "llama": Case("llama", {}, tied=False),
    "llama3": Case("llama", {}, theta=500_000.0, scaling=LLAMA3),
    "smollm2": Case(
        "llama", {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}, theta=100_000.0,
    ),
    "mistral": Case("mistral", {"sliding_window": None}, theta=1e6, tied=False),
    "mistral-nemo": Case("mistral", {"sliding_window": None, "head_dim": 32}, theta=1e6, tied=False),
    "qwen2-yarn": Case("qwen2", {}, tied=False, scaling=YARN),
    "llama-linear": Case("llama", {}, scaling=LINEAR),
    "qwen3": Case("qwen3", {"head_dim": 32}, tied=False, theta=1e6),
    "gemma2": Case(
        "gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32} | GEMMA2,
        {
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.5, "attention.sliding_window": 40,
        },
    ),
    "gemma2-27b": Case(
        "gemma2", {"head_dim": 32, "num_hidden_layers": 46, "query_pre_attn_scalar": 16} | GEMMA2,
        {
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.5, "attention.sliding_window": 40,
        },
    ),
    "gemma3": Case(
        "gemma3",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40, "num_hidden_layers": 7,
        },
        {"attention.sliding_window": 40}, theta=1e6, local_theta=10_000.0, scaling=LINEAR,
    ),
    "gemma3-27b": Case(
        "gemma3",
        {
            "head_dim": 32, "num_hidden_layers": 62, "query_pre_attn_scalar": 16, "sliding_window": 40,
        },
        {"attention.sliding_window": 40}, theta=1e6, local_theta=10_000.0, scaling=LINEAR,
    ),
    "gemma3-narrow": Case(  # windows begin and end within chunks, at their ends, and at those of pages
        "gemma3",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7,
        },
        {"attention.sliding_window": 8}, theta=1e6, local_theta=10_000.0,
    ),
    "gemma4": Case(  # like E2B
        "gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": VOCAB,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        },
        GEMMA4_KEYS
        | {
            "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 24,
            "feed_forward_length": [208] * 4 + [416] * 2,
            "attention.sliding_window_pattern": [True, True, False] * 2,
        },
        theta=1e6, local_theta=10_000.0, scaling=PROPORTIONAL, factors=PARTLY_ROTATED,
    ),
    "phi3": Case("phi3", {"sliding_window": 40}, {"attention.sliding_window": 40}, tied=False),
    "phi3-long": Case(
        "phi3", {"original_max_position_embeddings": 64},
        {
            "attention.sliding_window": 0, "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / 64) / math.log(64)),
        },
        tied=False, scaling=LONGROPE,
    ),
    "phi3-short": Case(
        "phi3", {"original_max_position_embeddings": 512},
        {
            "attention.sliding_window": 0, "rope.scaling.original_context_length": 512,
            "rope.scaling.attn_factor": 1.0,
        },
        tied=False, scaling=LONGROPE,
    ),
    "phi4": Case("phi3", {"sliding_window": None}, {"attention.sliding_window": 0}, tied=False),
    "phi4-mini": Case(
        "phi3", {"partial_rotary_factor": 0.75, "hidden_size": 192, "num_attention_heads": 6},
        {"attention.sliding_window": 0, "rope.dimension_count": 24},
    ),
    "smollm3": Case("smollm3", {"num_hidden_layers": 5}, theta=5e6),
    "granite": Case(
        "granite",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.6, "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
        {"embedding_scale": 12.0, "residual_scale": 0.6, "attention.scale": 0.1, "logit_scale": 4.0},
    ),
    "granite-biases": Case(
        "granite", {"attention_bias": True, "mlp_bias": True},
        {"embedding_scale": 1.0, "residual_scale": 1.0, "attention.scale": 1.0, "logit_scale": 1.0},
    ),
    "mistral3": Case(
        "mistral3", {"head_dim": 16},
        {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1}, theta=1e6,
        scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    ),
    "ernie4_5": Case("ernie4_5", {"head_dim": 32, "use_bias": False}, theta=500_000.0),
    "exaone4": Case(
        "exaone4",
        {
            "sliding_window": None, "head_dim": 16, "num_hidden_layers": 5,
            "layer_types": ["full_attention"] * 5,
        },
        theta=1e6, scaling=LLAMA3,
    ),
    "exaone4-windows": Case(
        "exaone4",
        {
            "sliding_window": 40, "num_hidden_layers": 5, "head_dim": 16,
            "layer_types": [
                "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                "full_attention",
            ],
        },
        {
            "attention.sliding_window": 40,
            "attention.sliding_window_pattern": [True, True, False, True, False],
        },
        tied=False, theta=1e6, scaling=LLAMA3,
    ),
    "glm4": Case(
        "glm4", {"head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5},
        {"rope.dimension_count": 16}, tied=False,
    ),
    "starcoder2": Case(
        "starcoder2", {"sliding_window": None, "norm_epsilon": 1e-5},
        {"attention.layer_norm_epsilon": 1e-5}, theta=1e5, tied=False,
    ),
    "stablelm": Case(
        "stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "layer_norm_eps": 1e-5},
        {"rope.dimension_count": 8, "use_parallel_residual": False, "attention.layer_norm_epsilon": 1e-5},
        tied=False,
    ),
    "stablelm-parallel": Case(
        "stablelm", {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "layer_norm_eps": 1e-5},
        {"rope.dimension_count": 8, "use_parallel_residual": True, "attention.layer_norm_epsilon": 1e-5},
        tied=False,
    ),
    "command-r": Case(
        "command-r", {"logit_scale": 0.25, "layer_norm_eps": 1e-5},
        {"logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5, "rope.scaling.type": "none"},
    ),
    "cohere2": Case(
        "cohere2",
        {"logit_scale": 0.25, "layer_norm_eps": 1e-5, "sliding_window": 40, "num_hidden_layers": 5},
        {
            "logit_scale": 0.25, "attention.layer_norm_epsilon": 1e-5, "rope.scaling.type": "none",
            "attention.sliding_window": 40, "rope.dimension_count": 16,
        },
    ),
    "hunyuan-dense": Case("hunyuan-dense", {"head_dim": 32}),
    "seed_oss": Case("seed_oss", {"head_dim": 32, "attention_bias": True}, tied=False, theta=1e7),
    "olmo2": Case("olmo2", {}, tied=False, theta=500_000.0),
    "olmo3": Case(
        "olmo3", {"sliding_window": 40, "num_hidden_layers": 5},
        {
            "attention.sliding_window": 40, "attention.sliding_window_pattern": [True] * 3 + [False, True],
            "rope.scaling.yarn_attn_factor": 1.25,
        },
        tied=False, local_theta=10_000.0, scaling=YARN | {"attention_factor": 1.25},
    ),
    "qwen35": Case(
        "qwen35",
        {
            "num_hidden_layers": 5, "head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1,
            "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
            "linear_num_value_heads": 6, "partial_rotary_factor": 0.25,
            "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"],
        },
        {
            "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6,
            "ssm.inner_size": 144, "full_attention_interval": 4, "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
        },
        theta=1e7,
    ),
    "qwen35-odd": Case(
        "qwen35",
        {
            "num_hidden_layers": 3, "head_dim": 32, "num_attention_heads": 5, "num_key_value_heads": 1,
            "linear_key_head_dim": 40, "linear_value_head_dim": 8, "linear_num_key_heads": 3,
            "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.25,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        {
            "ssm.conv_kernel": 3, "ssm.state_size": 40, "ssm.group_count": 3, "ssm.time_step_rank": 3,
            "ssm.inner_size": 24, "attention.recurrent_layers": [True, False, True],
            "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0],
        },
        theta=1e7, tied=False,
    ),
    "lfm2": Case(
        "lfm2",
        {
            "num_hidden_layers": 5, "norm_eps": 1e-6, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        },
        {"attention.head_count_kv": [0, 0, 2, 0, 2], "shortconv.l_cache": 4}, theta=1e6,
    ),
    "granitehybrid": Case(
        "granitehybrid",
        {
            "num_hidden_layers": 4, "shared_intermediate_size": 208, "num_local_experts": 0,
            "num_experts_per_tok": 0, "mamba_n_heads": 6, "mamba_n_groups": 1, "mamba_d_state": 24,
            "embedding_multiplier": 12.0, "residual_multiplier": 0.6, "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        },
        {
            "ssm.conv_kernel": 4, "ssm.state_size": 24, "ssm.group_count": 1, "ssm.time_step_rank": 6,
            "ssm.inner_size": 192, "attention.head_count_kv": [0, 0, 2, 0], "rope.scaling.finetuned": False,
            "embedding_scale": 12.0, "residual_scale": 0.6, "attention.scale": 0.1, "logit_scale": 4.0,
        },
    ),
    "nemotron_h": Case(
        "nemotron_h",
        {
            "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 2, "ssm_state_size": 24,
            "layer_norm_epsilon": 1e-6, "num_hidden_layers": None,
            "layers_block_type": [
                "linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention",
            ],
        },
        {
            "ssm.conv_kernel": 4, "ssm.state_size": 24, "ssm.group_count": 2, "ssm.time_step_rank": 6,
            "ssm.inner_size": 120, "attention.head_count_kv": [0, 0, 0, 2, 0, 0],
            "feed_forward_length": [0, 208, 0, 0, 208, 0], "attention.layer_norm_epsilon": 1e-6,
        },
        tied=False,
    ),
}  # fmt: skip
CLASSES = {  # of transformers: configuration and model
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "mistral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM"),
    "command-r": ("CohereConfig", "CohereForCausalLM"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
    "hunyuan-dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "qwen35": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "granitehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen35moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "lfm2moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "nemotron_h_moe": ("NemotronHConfig", "NemotronHForCausalLM"),
    "glm4moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "ernie4_5-moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "glm4-flash": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "deepseek2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
}
ARCHITECTURES = {
    "olmo3": "olmo2",
    "mistral": "llama",
    "mixtral": "llama",
    "glm4-flash": "deepseek2",
}  # of files, where their names differ
# Queries and keys of these are, so that pairs to rotate are neighbours.
PERMUTED = {"llama", "mistral", "smollm3", "granite", "granitehybrid", "mistral3", "mixtral", "granitemoe"}
