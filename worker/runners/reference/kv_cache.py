"""The reference runner's KV cache: where a step's tokens read and write it, and attention over it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.fp8 import as_kept

__all__ = ["KvCache", "Places", "choose_kv_blocks"]

DEFAULT_BYTES = 512 << 20
RowArray = npt.NDArray[np.intp]


def choose_kv_blocks(
    spec: ModelSpec,
    *,
    max_sequences: int,
    context: int,
    block_size: int = 16,
    memory: int = DEFAULT_BYTES,
) -> int:
    """Pages for `max_sequences` full contexts, or as many as fit into `memory` bytes.

    Raises RunnerError where not even one page fits.
    """
    page_bytes = 2 * block_size * sum(layer.attention.keys for layer in spec.layers) * 4
    if memory < page_bytes:
        raise RunnerError(
            f"the KV cache was given {memory} bytes, but one page of this model takes {page_bytes}"
        )
    return min(max_sequences * -(-context // block_size), memory // page_bytes)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's tokens read and write the cache; the same for all layers."""

    written: npt.NDArray[np.int32]  # (T,) cache rows
    positions: npt.NDArray[np.int32]  # (T,)
    single: RowArray  # indices of the tokens that were drawn
    single_rows: RowArray  # (their number, L) cache rows
    chunks: list[tuple[slice, RowArray]]  # longer chunks: their tokens, cache rows (1, L)


class KvCache:
    """Keys and values of each layer, float32 (cache rows, kv_heads, head_dim): what `kv` leaves of them.

    The row after the last page is never written: padding reads zeros there.
    """

    def __init__(
        self, spec: ModelSpec, *, pages: int, block_size: int, kv: KvFormat = KvFormat.ELEMENT
    ) -> None:
        self._kv = kv
        self._block_size = block_size
        self._zero_row = pages * block_size
        self.keys, self.values = (
            [self._empty(spec, index) for index in range(len(spec.layers))] for _ in "kv"
        )

    def _empty(self, spec: ModelSpec, index: int) -> npt.NDArray[np.float32]:
        attention = spec.layers[index].attention
        return np.zeros((self._zero_row + 1, attention.kv_heads, attention.head_dim), dtype=np.float32)

    def close(self) -> None:
        """Drop it all."""
        self.keys, self.values = [], []

    def attend(
        self, layer: int, q: ops.FloatArray, k: ops.FloatArray, v: ops.FloatArray, places: Places,
        how: ops.Scores,
    ) -> ops.FloatArray:  # fmt: skip
        """Write keys and values (T, kv_heads, head_dim), then let queries (T, heads, head_dim) read them."""
        keys, values = self.keys[layer], self.values[layer]
        if self._kv is KvFormat.FP8:
            k, v = as_kept(k), as_kept(v)
        keys[places.written], values[places.written] = k, v
        mixed, positions = np.empty_like(q), places.positions
        if places.single.size:
            single = places.single
            mixed[single] = ops.paged_attention(
                q[single, None], keys, values, places.single_rows, positions[single, None], how
            )[:, 0]
        for part, rows in places.chunks:
            chunk = ops.paged_attention(q[None, part], keys, values, rows, positions[None, part], how)
            mixed[part] = chunk[0]
        return mixed

    def places(self, batch: StepBatch) -> Places:
        """Where a step reads and writes."""
        starts = batch.sequence_starts
        alone = np.arange(batch.drawn)
        longer = np.arange(batch.drawn, len(batch.slots))
        return Places(
            written=batch.cache_rows,
            positions=batch.positions,
            single=starts[alone].astype(np.intp),
            single_rows=self._rows(batch, alone),
            chunks=[
                (slice(starts[index], starts[index + 1]), self._rows(batch, longer[place : place + 1]))
                for place, index in enumerate(longer)
            ],
        )

    def _rows(self, batch: StepBatch, sequences: RowArray) -> RowArray:
        """Cache rows (S, L) of the tokens of some sequences, padded with the row of zeros."""
        if not sequences.size:
            return np.zeros((0, ops.KEY_TILE), dtype=np.intp)
        lengths = batch.context_lengths[sequences]
        places = np.arange(-(-int(lengths.max()) // ops.KEY_TILE) * ops.KEY_TILE)
        tables = batch.block_tables[sequences]
        pages = tables[:, np.minimum(places // self._block_size, tables.shape[1] - 1)]
        rows = pages.astype(np.intp) * self._block_size + places % self._block_size
        return np.where(places < lengths[:, None], rows, self._zero_row)
