"""Prefill attention: how chunks of prompts are cut into tiles, and the launch of `hopper_attention.cu`."""

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.functions import Function
from nightmill.worker.runners.gpu.hopper import TensorMaps
from nightmill.worker.runners.gpu.kv_cache import PAGE

__all__ = ["TILE_ROWS", "HopperPrefill", "prefill_tiles"]

IntArray = npt.NDArray[np.int32]

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


class HopperPrefill:
    """Launches `hopper_attention.cu`."""

    ARGUMENTS = "128s128s128sPiPPPPiiif"
    ROWS = 192  # (token, query head) pairs in a tile
    THREADS = 512

    def __init__(self, device: Device, spec: ModelSpec, function: Function) -> None:
        self._attention = spec.layers[0].attention
        self._function = function
        self._maps = TensorMaps(device)
        self._shared = self.shared(spec)
        self._blocks = function.blocks_at_once(self.THREADS, self._shared) * device.multiprocessors

    @classmethod
    def shared(cls, spec: ModelSpec) -> int:
        """Bytes of dynamic shared memory: queries twice, stages of 64 keys and values."""
        attention = spec.layers[0].attention
        stages = 4 if attention.head_dim == 64 else 3
        return (2 * cls.ROWS + stages * 2 * 64) * attention.head_dim * 2 + 1024

    def run(
        self, qkv: int, k_cache: int, v_cache: int, block_tables: int, sequence_starts: int,
        context_lengths: int, out: int, tiles: int, tile_count: int, table_stride: int, scale: float,
        rows: int, pages: int,
    ) -> None:  # fmt: skip
        """Queue it; see `Kernels.prefill_attention`."""
        attention = self._attention
        heads, kv_heads, head = attention.heads, attention.kv_heads, attention.head_dim
        group = heads // kv_heads
        queries = self._maps.of_three(qkv, (rows, heads + 2 * kv_heads, head), (self.ROWS // group, group))
        keys, values = (
            self._maps(cache, pages * kv_heads * PAGE, head, PAGE) for cache in (k_cache, v_cache)
        )
        self._function(
            (min(tile_count * kv_heads, self._blocks), 1, 1), (self.THREADS, 1, 1), queries, keys, values,
            block_tables, table_stride, context_lengths, sequence_starts, tiles, out, tile_count, heads,
            kv_heads, scale, shared=self._shared,
        )  # fmt: skip
