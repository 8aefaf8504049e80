"""The transformer in NumPy: what a GPU runner has to reproduce, and the runner where there is no GPU.

float32 throughout. All tokens of a step go through the matrices together; attention takes the sequences that
decode (one token each) in one piece and every longer chunk by itself. The LM head sees only the rows that
draw. A job's tokens do not depend on what else is in the batch (see `reference_ops`).
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_info

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import ModelSpec, Role, Weight
from nightmill.worker.runners import reference_ops as ops
from nightmill.worker.runners.base import FROM_SLOT, NOT_A_NUMBER, Admission, SampledTokens, StepBatch
from nightmill.worker.runners.sampling import SamplingRows, sample

FloatArray = npt.NDArray[np.float32]
Weights = dict[Role, FloatArray]
Trace = Callable[[str, npt.NDArray[Any]], None]
DEFAULT_CACHE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a step's tokens read and write the cache; the same for all layers."""

    rotations: dict[Rope, tuple[ops.FloatArray, ops.FloatArray]]  # cosine and sine
    single: npt.NDArray[np.intp]  # indices of the tokens that were drawn
    single_rows: npt.NDArray[np.intp]  # (their number, L) cache rows
    chunks: list[tuple[slice, npt.NDArray[np.intp]]]  # longer chunks: their tokens, cache rows (1, L)


def choose_kv_blocks(
    spec: ModelSpec,
    *,
    max_sequences: int,
    context: int,
    block_size: int = 16,
    memory: int = DEFAULT_CACHE_BYTES,
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


class ReferenceRunner:
    """Runs steps on the CPU; `launch` computes, `collect` hands out the result.

    file, spec       the model; weights are kept as float32
    kv_blocks        pages of `block_size` tokens; the memory is only touched as pages are used
    slots            sequences at once
    depth            launches that may be queued before one is collected
    trace            called with a name and an array at each stage of a step: "embedding", "layer.0", ...,
                     "norm" (all tokens), "logits" (only the rows that draw)
    """

    def __init__(
        self, file: GgufFile, spec: ModelSpec, *, kv_blocks: int, block_size: int = 16, slots: int,
        depth: int = 1, trace: Trace | None = None,
    ) -> None:  # fmt: skip
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.slots = slots
        self.depth = depth
        self.vocab = spec.vocab
        self.arithmetic = _arithmetic()
        self._spec = spec
        self._trace = trace
        self._embedding = file.array("token_embd.weight")
        self._layers = [_load(file, spec.layer_weights(index)) for index in range(len(spec.layers))]
        self._output_norm = file.array("output_norm.weight")
        head = self._embedding if spec.tied_head else file.array("output.weight")
        self._head = head.T
        matrices = (weight for layer in self._layers for weight in layer.values() if weight.ndim == 2)
        shapes = {matrix.shape: matrix for matrix in matrices}
        self._tiled = not all(map(ops.rows_are_independent, (*shapes.values(), self._head)))
        ropes = {layer.attention.rope for layer in spec.layers}
        self._frequencies = {rope: rope.frequencies() for rope in ropes}
        # The row after the last page is never written: padding reads zeros there.
        self._zero_row = kv_blocks * block_size
        self._keys, self._values = (
            [
                np.zeros(
                    (self._zero_row + 1, one.attention.kv_heads, one.attention.head_dim), dtype=np.float32
                )
                for one in spec.layers
            ]
            for _ in range(2)
        )
        self._last_token = np.zeros(slots, dtype=np.int32)
        self._temperature = np.zeros(slots, dtype=np.float32)
        self._top_k = np.zeros(slots, dtype=np.int32)
        self._top_p = np.ones(slots, dtype=np.float32)
        self._min_p = np.zeros(slots, dtype=np.float32)
        self._penalty = np.ones(slots, dtype=np.float32)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._seen: list[npt.NDArray[np.bool_] | None] = [None] * slots
        self._results: deque[SampledTokens] = deque()

    def launch(self, batch: StepBatch) -> None:
        """Compute a step and queue its tokens.

        Raises RunnerError where memory runs out.
        """
        if len(self._results) >= self.depth:
            raise RunnerError(f"{self.depth} launches are outstanding already: collect one first")
        for admission in batch.admissions:
            self._admit(admission)
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # what is not a number is told by its token
                hidden = self._forward(batch)
                self._results.append(self._draw(batch, hidden[batch.sample_rows]))
        except MemoryError as error:
            raise RunnerError(f"out of memory in a step of {len(batch.tokens)} tokens: {error}") from error

    def collect(self) -> SampledTokens | None:
        """Return the tokens of the oldest launch that was not yet collected."""
        return self._results.popleft() if self._results else None

    def close(self) -> None:
        """Drop weights and cache."""
        self._layers = []
        self._keys, self._values = [], []
        self._results.clear()

    def _admit(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.params
        self._last_token[slot] = admission.token_ids[-1]
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._penalty[slot] = params.repetition_penalty
        self._seeds[slot] = admission.seed
        self._seen[slot] = None
        if params.repetition_penalty != 1.0:
            seen = np.zeros(self.vocab, dtype=np.bool_)
            seen[list(admission.token_ids)] = True
            self._seen[slot] = seen

    def _forward(self, batch: StepBatch) -> ops.FloatArray:
        """All layers over all tokens; returns the normed hidden states (T, width)."""
        token_slots = np.repeat(batch.slots, np.diff(batch.sequence_starts))
        tokens = np.where(batch.tokens == FROM_SLOT, self._last_token[token_slots], batch.tokens)
        places = self._places(batch)
        x = ops.embedding(self._embedding, tokens)
        self._report("embedding", x)
        for index, layer in enumerate(self._spec.layers):
            weights = self._layers[index]
            normed = ops.rms_norm(x, weights[Role.ATTN_NORM], layer.attention_norm.eps)
            x = x + self._attend(batch, index, normed, places)
            normed = ops.rms_norm(x, weights[Role.FFN_NORM], layer.feed_forward_norm.eps)
            activated = ops.swiglu(self._linear(normed, weights[Role.GATE_UP]))
            x = x + self._linear(activated, weights[Role.FFN_DOWN])
            self._report(f"layer.{index}", x)
        x = ops.rms_norm(x, self._output_norm, self._spec.output_norm.eps)
        self._report("norm", x)
        return x

    def _attend(self, batch: StepBatch, index: int, x: ops.FloatArray, places: _Places) -> ops.FloatArray:
        """Self-attention of one block: writes the step's keys and values, then reads the cache."""
        attention, weights = self._spec.layers[index].attention, self._layers[index]
        heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
        qkv = self._linear(x, weights[Role.QKV], weights.get(Role.QKV_BIAS))
        q, k, v = np.split(qkv.reshape(len(x), -1, head_dim), [heads, heads + kv_heads], axis=1)
        if attention.qk_norm is not None:
            q = ops.rms_norm(q, weights[Role.Q_NORM], attention.qk_norm.eps)
            k = ops.rms_norm(k, weights[Role.K_NORM], attention.qk_norm.eps)
        cosine, sine = places.rotations[attention.rope]
        interleaved = attention.rope.style is RopeStyle.PAIRS
        q = ops.rope(q, cosine, sine, interleaved=interleaved)
        keys, values = self._keys[index], self._values[index]
        keys[batch.cache_rows] = ops.rope(k, cosine, sine, interleaved=interleaved)
        values[batch.cache_rows] = v
        mixed = np.empty_like(q)
        positions = batch.positions
        if places.single.size:
            single = places.single
            mixed[single] = ops.paged_attention(
                q[single, None], keys, values, places.single_rows, positions[single, None]
            )[:, 0]
        for tokens, rows in places.chunks:
            mixed[tokens] = ops.paged_attention(q[None, tokens], keys, values, rows, positions[None, tokens])[
                0
            ]
        return self._linear(mixed.reshape(len(x), heads * head_dim), weights[Role.ATTN_OUTPUT])

    def _places(self, batch: StepBatch) -> _Places:
        starts = batch.sequence_starts
        alone = np.arange(batch.drawn)
        longer = np.arange(batch.drawn, len(batch.slots))
        return _Places(
            rotations={
                rope: ops.rope_table(batch.positions, frequencies, rope.magnitude, np.float32)
                for rope, frequencies in self._frequencies.items()
            },
            single=starts[alone].astype(np.intp),
            single_rows=self._rows(batch, alone),
            chunks=[
                (slice(starts[index], starts[index + 1]), self._rows(batch, longer[place : place + 1]))
                for place, index in enumerate(longer)
            ],
        )

    def _rows(self, batch: StepBatch, sequences: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Cache rows (S, L) of the tokens of some sequences, padded with the row of zeros."""
        if not sequences.size:
            return np.zeros((0, ops.KEY_TILE), dtype=np.intp)
        lengths = batch.context_lengths[sequences]
        places = np.arange(-(-int(lengths.max()) // ops.KEY_TILE) * ops.KEY_TILE)
        tables = batch.block_tables[sequences]
        pages = tables[:, np.minimum(places // self.block_size, tables.shape[1] - 1)]
        rows = pages.astype(np.intp) * self.block_size + places % self.block_size
        return np.where(places < lengths[:, None], rows, self._zero_row)

    def _draw(self, batch: StepBatch, hidden: ops.FloatArray) -> SampledTokens:
        slots = batch.sample_slots
        if not slots.size:
            return SampledTokens(slots, np.zeros(0, dtype=np.int32))
        logits = self._linear(hidden, self._head).astype(np.float32, copy=False)
        self._report("logits", logits)
        tokens = sample(
            logits,
            SamplingRows(
                temperature=self._temperature[slots],
                top_k=self._top_k[slots],
                top_p=self._top_p[slots],
                min_p=self._min_p[slots],
                penalty=self._penalty[slots],
                seeds=self._seeds[slots],
                positions=batch.positions[batch.sample_rows].astype(np.int64) + 1,
                seen=[self._seen[slot] for slot in slots],
            ),
        )
        self._last_token[slots] = np.where(tokens == NOT_A_NUMBER, 0, tokens)
        for slot, token in zip(slots, tokens, strict=True):
            if (seen := self._seen[slot]) is not None and token != NOT_A_NUMBER:
                seen[token] = True
        return SampledTokens(slots, tokens)

    def _linear(
        self, x: ops.FloatArray, weight: FloatArray, bias: FloatArray | None = None
    ) -> ops.FloatArray:
        return ops.linear(x, weight, bias, tiled=self._tiled)

    def _report(self, stage: str, values: npt.NDArray[Any]) -> None:
        if self._trace is not None:
            self._trace(stage, values)


def _arithmetic() -> str:
    """NumPy, its BLAS, and the processor that this has kernels for."""
    libraries = [
        f"{one['internal_api']} {one['version']} {one.get('architecture', '')}".rstrip()
        for one in threadpool_info()
        if one["user_api"] == "blas"
    ]
    return ", ".join([f"NumPy {np.__version__} in FP32", *sorted(libraries)])


def _load(file: GgufFile, weights: Mapping[Role, Weight]) -> Weights:
    """Read weights; matrices become (inputs, outputs): tokens are rows, and multiply from the left."""

    def load(weight: Weight) -> FloatArray:
        stacked = np.concatenate([file.array(name) for name in weight.names])
        return np.ascontiguousarray(stacked.T) if weight.is_matrix else stacked

    return {role: load(weight) for role, weight in weights.items()}
