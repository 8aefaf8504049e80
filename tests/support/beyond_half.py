"""A model whose feed-forward network goes far beyond half, and decides its texts."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.ggufs import byte_vocabulary, write_model

__all__ = ["LARGEST", "VOCAB", "follows", "write_beyond_half"]

VOCAB = -(-len(byte_vocabulary().tokens) // 32) * 32
WIDTH = 128
LARGEST = 1e6
"""About what enters the product `down`; half ends at 65,504."""


def follows(token: int) -> int:
    """The token that the model says after this one: each once, then again."""
    return (token * 45 + 17) % VOCAB


def write_beyond_half(path: Path) -> Path:
    """Write it, of one layer with two heads of 64, and return `path`.

    Embeddings are random signs. Neuron t of the network has that of token t as gate and as up, so that it
    answers to that token alone, with LARGEST, which `down` brings back to four times the embedding of the
    next. Attention adds little.
    """
    rng = np.random.default_rng(7)
    signs = rng.choice([-1.0, 1.0], (VOCAB, WIDTH)).astype(np.float32)
    neurons = signs * np.float32(LARGEST**0.5 / WIDTH)
    after = signs[[follows(token) for token in range(VOCAB)]]
    down: npt.NDArray[np.float32] = np.ascontiguousarray(after.T) * np.float32(4 / LARGEST)
    ones = np.ones(WIDTH, dtype=np.float32)
    mixed = (rng.standard_normal((WIDTH, WIDTH)) * 0.01).astype(np.float32)
    tensors = {
        "token_embd.weight": signs, "blk.0.attn_norm.weight": ones, "blk.0.ffn_norm.weight": ones,
        "output_norm.weight": ones, "blk.0.attn_output.weight": mixed, "blk.0.ffn_gate.weight": neurons,
        "blk.0.ffn_up.weight": neurons, "blk.0.ffn_down.weight": down,
    }  # fmt: skip
    return write_model(
        path, layers=1, width=WIDTH, ffn=VOCAB, heads=2, kv_heads=1, head_dim=64,
        padding_rows=VOCAB - len(byte_vocabulary().tokens), tensors=tensors,
    )  # fmt: skip
