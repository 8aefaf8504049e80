"""The reference runner's KV cache: where a step's tokens read and write it, and attention over it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.fp8 import as_kept

__all__ = ["Places", "ReferenceKvCache", "choose_kv_pages"]

DEFAULT_BYTES = 512 << 20
RowArray = npt.NDArray[np.intp]


def choose_kv_pages(
    spec: ModelSpec,
    *,
    max_sequences: int,
    context: int,
    page_size: int = 16,
    memory: int = DEFAULT_BYTES,
) -> int:
    """Pages for `max_sequences` full contexts, or as many as fit into `memory` bytes.

    Raises RunnerError where not even one page fits.
    """
    page_bytes = 2 * page_size * spec.keys * 4
    if memory < page_bytes:
        raise RunnerError(
            f"the KV cache was given {memory} bytes, but one page of this model takes {page_bytes}"
        )
    return min(max_sequences * -(-context // page_size), memory // page_bytes)


@dataclass(frozen=True, slots=True)
class Places:
    """Rows of the cache that a step's tokens read and write; the same for all layers."""

    written: npt.NDArray[np.int32]  # (T,) cache rows
    positions: npt.NDArray[np.int32]  # (T,)
    single: RowArray  # indices of the tokens that were drawn
    single_rows: RowArray  # (their number, L) cache rows
    chunks: list[tuple[slice, RowArray]]  # longer chunks: their tokens, cache rows (1, L)


class ReferenceKvCache:
    """Keys and values of each layer of attention: what `kv` leaves of them.

    They are float32 (cache rows, kv_heads, head_dim); layers that keep none have no heads. Latent attention
    has one head of what it keeps, whose keys are its values, too.

    The row after the last page is never written: padding reads zeros there.
    """

    def __init__(
        self, spec: ModelSpec, *, pages: int, page_size: int, kv: KvFormat = KvFormat.ELEMENT
    ) -> None:
        self._kv = kv
        self._page_size = page_size
        self._zero_row = pages * page_size
        layers = range(len(spec.layers))
        self.keys = [self._empty(spec, index) for index in layers]
        self.values = [
            self.keys[index]
            if isinstance(spec.layers[index].mixer, LatentAttention)
            else self._empty(spec, index)
            for index in layers
        ]

    def _empty(self, spec: ModelSpec, index: int) -> npt.NDArray[np.float32]:
        mixer = spec.caches[index]
        heads = (mixer.kv_heads, mixer.head_dim) if isinstance(mixer, Attention) else (0, 0)
        if isinstance(mixer, LatentAttention):
            heads = (1, mixer.kept)
        return np.zeros((self._zero_row + 1, *heads), dtype=np.float32)

    def close(self) -> None:
        """Drop it all."""
        self.keys, self.values = [], []

    def write(self, layer: int, k: ops.FloatArray, v: ops.FloatArray, places: Places) -> None:
        """Write a layer's keys and values (T, kv_heads, head_dim)."""
        if self._kv is KvFormat.FP8:
            k, v = as_kept(k), as_kept(v)
        self.keys[layer][places.written], self.values[layer][places.written] = k, v

    def attend(self, layer: int, q: ops.FloatArray, places: Places, how: ops.Scores) -> ops.FloatArray:
        """Let queries (T, heads, head_dim) read the keys and values of a layer."""
        keys, values = self.keys[layer], self.values[layer]
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
        """Find the rows that a step reads and writes."""
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
        tables = batch.page_tables[sequences]
        pages = tables[:, np.minimum(places // self._page_size, tables.shape[1] - 1)]
        rows = pages.astype(np.intp) * self._page_size + places % self._page_size
        return np.where(places < lengths[:, None], rows, self._zero_row)
