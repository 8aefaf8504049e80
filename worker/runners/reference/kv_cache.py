"""The reference runner's KV cache: where a step's tokens read and write it, and attention over it."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.base import KindRows, PageKind, StepBatch
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.page_layout import PageLayout, page_layout
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.fp8 import as_kept

__all__ = ["Places", "ReferenceKvCache", "choose_kv_pages", "reference_layout"]

DEFAULT_BYTES = 512 << 20
RowArray = npt.NDArray[np.intp]


def reference_layout(spec: ModelSpec, page_size: int) -> PageLayout:
    """Lay out pages of float32 numbers."""
    return page_layout(spec, page_size, lambda mixer: page_size * _heads(mixer) * _size(mixer))


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
    layout = reference_layout(spec, page_size)
    page_bytes = max(1, 4 * layout.numbers)
    if memory < page_bytes:
        raise RunnerError(
            f"the KV cache was given {memory} bytes, but one page of this model takes {page_bytes}"
        )
    return min(max_sequences * layout.pages_for(context), memory // page_bytes)


@dataclass(frozen=True, slots=True)
class KindPlaces:
    """Rows of the cache that a step's tokens read and write, in the layers of a kind."""

    written: npt.NDArray[np.int32]  # (T,) cache rows
    single_rows: RowArray  # (single tokens, L) cache rows
    chunk_rows: list[RowArray]  # (1, L) cache rows of each longer chunk


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a step's tokens in their sequences, and in the pages of each kind."""

    positions: npt.NDArray[np.int32]  # (T,)
    single: RowArray  # indices of the tokens that were drawn
    chunks: list[slice]  # tokens of longer chunks
    kinds: list[KindPlaces]


class ReferenceKvCache:
    """Keys and values of each layer of attention: what `kv` leaves of them.

    They are float32 (cache rows, kv_heads, head_dim), views of the memory of all pages, which have as many
    numbers whatever their kind; layers that keep none have no rows. Latent attention has one head of what it
    keeps, whose keys are its values, too.

    The page after the last is never written: padding, and what a window hides, reads zeros there.
    """

    def __init__(
        self, spec: ModelSpec, *, pages: int, page_size: int, kv: KvFormat = KvFormat.ELEMENT
    ) -> None:
        self._kv = kv
        self._page_size = page_size
        self._zero_page = pages
        self.layout = reference_layout(spec, page_size)
        self._memory = np.zeros((pages + 1) * self.layout.numbers, dtype=np.float32)
        self.keys: list[npt.NDArray[np.float32]] = []
        self.values: list[npt.NDArray[np.float32]] = []
        for mixer, part in zip(spec.caches, self.layout.layers, strict=True):
            for kept, first in (
                (self.keys, 0 if part is None else part.keys),
                (self.values, 0 if part is None else part.values),
            ):
                kept.append(self._rows_of(mixer, first))

    def _rows_of(self, mixer: Attention | LatentAttention | None, first: int) -> npt.NDArray[np.float32]:
        """Rows of keys, or of values, which begin at the number `first` of a page."""
        if mixer is None:
            return np.zeros((0, 0, 0), dtype=np.float32)
        heads, size, pages = _heads(mixer), _size(mixer), self._zero_page + 1
        if self.layout.apart:
            first, rows = first * pages, pages * self._page_size
        else:
            rows = (len(self._memory) - first) // (heads * size)
        return self._memory[first : first + rows * heads * size].reshape(rows, heads, size)

    def fill(self, value: float) -> None:
        """Write a value to all pages but the one of zeros; for tests."""
        if not self.layout.apart:
            self._memory[: -self.layout.numbers] = value
            return
        for rows in (*self.keys, *self.values):
            rows[: -self._page_size] = value

    @property
    def zeros(self) -> list[npt.NDArray[np.float32]]:
        """The numbers that are never written; for tests."""
        if not self.layout.apart:
            return [self._memory[-self.layout.numbers :]]
        return [rows[-self._page_size :] for rows in (*self.keys, *self.values)]

    def close(self) -> None:
        """Drop it all."""
        self.keys, self.values = [], []
        self._memory = np.zeros(0, dtype=np.float32)

    def write(self, layer: int, k: ops.FloatArray, v: ops.FloatArray, places: Places) -> None:
        """Write a layer's keys and values (T, kv_heads, head_dim)."""
        if self._kv is KvFormat.FP8:
            k, v = as_kept(k), as_kept(v)
        written = self._kind(layer, places).written
        self.keys[layer][written], self.values[layer][written] = k, v

    def attend(self, layer: int, q: ops.FloatArray, places: Places, how: ops.Scores) -> ops.FloatArray:
        """Let queries (T, heads, head_dim) read the keys and values of a layer."""
        keys, values, kind = self.keys[layer], self.values[layer], self._kind(layer, places)
        mixed, positions = np.empty_like(q), places.positions
        if places.single.size:
            single = places.single
            mixed[single] = ops.paged_attention(
                q[single, None], keys, values, kind.single_rows, positions[single, None], how
            )[:, 0]
        for part, rows in zip(places.chunks, kind.chunk_rows, strict=True):
            if not how.causal:  # the chunk is a whole text
                how = replace(how, until=int(positions[part][-1]) + 1)
            chunk = ops.paged_attention(q[None, part], keys, values, rows, positions[None, part], how)
            mixed[part] = chunk[0]
        return mixed

    def places(self, batch: StepBatch) -> Places:
        """Find the rows that a step reads and writes."""
        starts = batch.sequence_starts
        alone = np.arange(batch.drawn)
        longer = range(batch.drawn, len(batch.slots))
        return Places(
            positions=batch.positions,
            single=starts[alone].astype(np.intp),
            chunks=[slice(starts[index], starts[index + 1]) for index in longer],
            kinds=[
                KindPlaces(
                    written=given.cache_rows,
                    single_rows=self._rows(batch, kind, given, alone),
                    chunk_rows=[self._rows(batch, kind, given, np.array([index])) for index in longer],
                )
                for kind, given in zip(self.layout.kinds, batch.kinds, strict=True)
            ],
        )

    def _kind(self, layer: int, places: Places) -> KindPlaces:
        part = self.layout.layers[layer]
        assert part is not None, f"layer {layer} keeps no keys"
        return places.kinds[part.kind]

    def _rows(self, batch: StepBatch, kind: PageKind, given: KindRows, chunks: RowArray) -> RowArray:
        """Cache rows (S, L) of the tokens of some chunks' sequences; those of zeros where they do not see."""
        if not chunks.size:
            return np.zeros((0, ops.KEY_TILE), dtype=np.intp)
        ends = batch.context_lengths[chunks]
        starts = ends - np.diff(batch.sequence_starts)[chunks]
        places = np.arange(-(-int(ends.max()) // ops.KEY_TILE) * ops.KEY_TILE)
        tables = given.page_tables[chunks]
        entries = tables[:, np.minimum(places // self._page_size, tables.shape[1] - 1)]
        rows = entries.astype(np.intp) * self._page_size + places % self._page_size
        first = np.array([kind.first_seen(start) for start in starts.tolist()])
        seen = (places >= first[:, None]) & (places < ends[:, None])
        return np.where(seen, rows, self._zero_page * kind.stride * self._page_size)


def _heads(mixer: Attention | LatentAttention) -> int:
    return mixer.kv_heads if isinstance(mixer, Attention) else 1


def _size(mixer: Attention | LatentAttention) -> int:
    return mixer.head_dim if isinstance(mixer, Attention) else mixer.kept
