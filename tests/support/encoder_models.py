"""Random encoders as GGUF files: BERT with a small vocabulary of WordPiece."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import TokenType

from nightmill.worker.model.ranking import RankHead
from tests.support.ggufs import write_file

ENCODERS = frozenset({"bert", "nomic-bert", "modern-bert"})
"""Families that embed texts, and write none."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("night", "mill", "river", "wheel", "grain", "stone", "the", ".", ",")
PIECES = [*SPECIAL, *(f"▁{word}" for word in WORDS), "▁w", "ing", "s", "hee", "l"]
CLS, SEP, UNKNOWN = 2, 3, 1
LAYERS, WIDTH, FFN, CONTEXT = 2, 32, 64, 96


def tensors_of_bert(seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.5) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def linear(name: str, outputs: int, inputs: int) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.weight": normal(outputs, inputs), f"{name}.bias": normal(outputs)}

    def norm(name: str) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.weight": 1 + normal(WIDTH, scale=0.1), f"{name}.bias": normal(WIDTH, scale=0.1)}

    tensors = {
        "token_embd.weight": normal(len(PIECES), WIDTH), "position_embd.weight": normal(CONTEXT, WIDTH),
        "token_types.weight": normal(2, WIDTH), **norm("token_embd_norm"),
    }  # fmt: skip
    for index in range(LAYERS):
        block = f"blk.{index}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors |= linear(block + part, WIDTH, WIDTH)
        tensors |= norm(block + "attn_output_norm") | norm(block + "layer_output_norm")
        tensors |= linear(block + "ffn_up", FFN, WIDTH) | linear(block + "ffn_down", WIDTH, FFN)
    return tensors


RANKING = RankHead(second_type=True)
"""The head of a cross-encoder of BERT's kind."""


def rank_tensors(width: int = WIDTH, seed: int = 1) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights of such a head."""
    rng = np.random.default_rng(seed)
    shapes = {"weight": (width, width), "bias": (width,), "output.weight": (1, width), "output.bias": (1,)}
    return {f"cls.{name}": rng.standard_normal(shape, np.float32) * 0.3 for name, shape in shapes.items()}


def write_bert(
    path: Path, *, keys: Mapping[str, Any] | None = None, without: str = "", seed: int = 0,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> Path:  # fmt: skip
    """Write such a model, and return `path`; `keys` stand beside the usual ones or in their place.

    without  a tensor that is left out
    tensors  more of them, or others
    """
    usual = {
        "block_count": LAYERS, "context_length": CONTEXT, "embedding_length": WIDTH,
        "feed_forward_length": FFN, "attention.head_count": 4, "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False, "pooling_type": 2,
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": [
            int(TokenType.UNKNOWN if text == "[UNK]" else TokenType.CONTROL if text in SPECIAL else 1)
            for text in PIECES
        ],
        "tokenizer.ggml.bos_token_id": CLS, "tokenizer.ggml.eos_token_id": SEP,
        "tokenizer.ggml.seperator_token_id": SEP, "tokenizer.ggml.unknown_token_id": UNKNOWN,
    }  # fmt: skip
    all_tensors = tensors_of_bert(seed) | dict(tensors or {})
    held = {name: one for name, one in all_tensors.items() if name != without}
    return write_file(path, "bert", usual | dict(keys or {}), held)


def write_reranker(path: Path, *, keys: Mapping[str, Any] | None = None, **more: Any) -> Path:
    """Write a cross-encoder of such a model, as `write_bert` does."""
    return write_bert(path, keys={"pooling_type": 4} | dict(keys or {}), tensors=rank_tensors(), **more)
