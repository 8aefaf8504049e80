"""Random encoders of transformers, and the GGUF files that llama.cpp's converter would make of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.ggufs import byte_vocabulary, write_file

VOCAB = len(byte_vocabulary().tokens) + 5
CONTEXT = 160
NAMES = {
    "bert": {
        "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
        "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
        "encoder.layer.N.attention.self.query": "attn_q", "encoder.layer.N.attention.self.key": "attn_k",
        "encoder.layer.N.attention.self.value": "attn_v",
        "encoder.layer.N.attention.output.dense": "attn_output",
        "encoder.layer.N.attention.output.LayerNorm": "attn_output_norm",
        "encoder.layer.N.intermediate.dense": "ffn_up", "encoder.layer.N.output.dense": "ffn_down",
        "encoder.layer.N.output.LayerNorm": "layer_output_norm",
    },
    "nomic-bert": {
        "embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
        "embeddings.LayerNorm": "token_embd_norm", "layers.N.self_attn.q_proj": "attn_q",
        "layers.N.self_attn.k_proj": "attn_k", "layers.N.self_attn.v_proj": "attn_v",
        "layers.N.self_attn.o_proj": "attn_output", "layers.N.post_attention_layernorm": "attn_output_norm",
        "layers.N.mlp.gate_proj": "ffn_gate", "layers.N.mlp.up_proj": "ffn_up",
        "layers.N.mlp.down_proj": "ffn_down", "layers.N.post_mlp_layernorm": "layer_output_norm",
    },
    "modern-bert": {
        "embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm",
        "layers.N.attn.Wqkv": "attn_qkv", "layers.N.attn.Wo": "attn_output",
        "layers.N.attn_norm": "attn_norm", "layers.N.mlp_norm": "ffn_norm", "layers.N.mlp.Wi": "ffn_up",
        "layers.N.mlp.Wo": "ffn_down", "final_norm": "output_norm",
    },
}  # fmt: skip
"""What llama.cpp's converter calls the tensors of transformers' models."""
KEYS = {
    "bert": {},
    "nomic-bert": {"rope.freq_base": 1000.0},
    "modern-bert": {"rope.freq_base": 160_000.0, "attention.sliding_window": 16},
}
MODERN_IDS = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
"""Ids that transformers' ModernBERT has, in a vocabulary of this size."""


def random_sizes(rng: np.random.Generator) -> dict[str, Any]:
    """Sizes of an encoder, as transformers' configurations call them."""
    heads = int(rng.integers(1, 5))
    return {
        "vocab_size": VOCAB, "hidden_size": 8 * heads * int(rng.integers(2, 5)), "num_attention_heads": heads,
        "num_hidden_layers": int(rng.integers(2, 6)), "intermediate_size": 16 * int(rng.integers(3, 9)),
        "max_position_embeddings": CONTEXT,
    }  # fmt: skip


def shaken(make: Callable[[], Any], rng: np.random.Generator) -> Any:
    """A model with random weights, none of which is 0 or 1, as those of norms and biases are at first."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + torch.randn_like(parameter) * 0.2)
    return model.eval()


def name_in_file(family: str, name: str) -> str:
    """What llama.cpp's converter calls a module of transformers' models, without `weight` or `bias`."""
    number = next((part for part in name.split(".") if part.isdecimal()), "")
    if not number:
        return NAMES[family][name]
    return f"blk.{number}.{NAMES[family]['N'.join(name.split(number))]}"


def write_encoder(
    path: Path, family: str, config: Any, tensors: Mapping[str, npt.NDArray[Any]], pooling: int
) -> Path:
    """Write a file with these tensors, and the keys of a configuration of transformers."""
    keys = {
        "block_count": config.num_hidden_layers, "context_length": CONTEXT,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.causal": False,
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", None) or config.norm_eps,
        "pooling_type": pooling,
    }  # fmt: skip
    return write_file(path, family, keys | KEYS[family], dict(tensors))
