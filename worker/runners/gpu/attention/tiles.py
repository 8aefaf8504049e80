"""Division of chunks of prompts into tiles for prefill attention."""

import numpy as np

from nightmill.worker.runners.base import IntArray

__all__ = ["TILE_BYTES", "TILE_ROWS", "prefill_tiles"]

TILE_BYTES = 8  # of its two numbers on the GPU
TILE_ROWS = 128  # (token, query head) pairs in a tile, but for `hopper_attention.cu`


def prefill_tiles(
    sequence_starts: IntArray, heads_per_kv_head: int, context_lengths: IntArray | None = None,
    rows: int = TILE_ROWS, drawn: int = 0,
) -> IntArray:  # fmt: skip
    """Pieces (n, 2) of the chunks of prompts, as (chunk, piece); the first `drawn` chunks are not of prompts.

    A piece is rows // heads_per_kv_head tokens. Those that see most keys come first, for an even end;
    without `context_lengths`, chunks are taken for whole prompts.
    """
    lengths = np.diff(sequence_starts)
    tokens = rows // heads_per_kv_head
    pieces = -(-lengths // tokens)
    pieces[:drawn] = 0
    sequences = np.repeat(np.arange(len(lengths), dtype=np.int32), pieces)
    ends = np.cumsum(pieces)
    place = np.arange(len(sequences), dtype=np.int32) - np.repeat(ends - pieces, pieces).astype(np.int32)
    keys = np.minimum((place + 1) * tokens, lengths[sequences])
    if context_lengths is not None:
        keys = keys + (context_lengths - lengths)[sequences]
    tiles = np.stack([sequences, place], axis=1).astype(np.int32)
    return np.ascontiguousarray(tiles[np.argsort(-keys, kind="stable")])
