"""Runs steps on the CPU: what slots hold, the forward pass, and the tokens drawn."""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_info

from nightmill.jobs.arithmetic import DIGITS, Arithmetic
from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import FROM_SLOT, NOT_A_NUMBER, Admission, SampledTokens, StepBatch
from nightmill.worker.runners.reference.kv_cache import KvCache
from nightmill.worker.runners.reference.model import Model, Trace
from nightmill.worker.runners.sampling import SamplingRows, sample

__all__ = ["ReferenceRunner"]


class ReferenceRunner:
    """Runs steps on the CPU; `launch` computes, `collect` hands out the result.

    file, spec       the model; weights are kept as float32
    kv_blocks        pages of `block_size` tokens; the memory is only touched as pages are used
    slots            sequences at once
    depth            launches that may be queued before one is collected
    trace            told the stages of a step, as `model.Model` says
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
        self.arithmetic = _arithmetic(file)
        self._cache = KvCache(spec, pages=kv_blocks, block_size=block_size)
        self._model = Model(file, spec, self._cache, trace)
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
                hidden = self._model.forward(self._tokens(batch), self._cache.places(batch))
                self._results.append(self._draw(batch, hidden[batch.sample_rows]))
        except MemoryError as error:
            raise RunnerError(f"out of memory in a step of {len(batch.tokens)} tokens: {error}") from error

    def collect(self) -> SampledTokens | None:
        """Return the tokens of the oldest launch that was not yet collected."""
        return self._results.popleft() if self._results else None

    def close(self) -> None:
        """Drop weights and cache."""
        self._model.close()
        self._cache.close()
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

    def _tokens(self, batch: StepBatch) -> npt.NDArray[np.int32]:
        """The step's tokens (T,), those too that only the slots know."""
        slots = np.repeat(batch.slots, np.diff(batch.sequence_starts))
        return np.where(batch.tokens == FROM_SLOT, self._last_token[slots], batch.tokens)

    def _draw(self, batch: StepBatch, hidden: npt.NDArray[Any]) -> SampledTokens:
        slots = batch.sample_slots
        if not slots.size:
            return SampledTokens(slots, np.zeros(0, dtype=np.int32))
        tokens = sample(
            self._model.logits(hidden),
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


def _arithmetic(file: GgufFile) -> Arithmetic:
    """NumPy on its BLAS, and the processor that this has kernels for."""
    libraries = [
        f"{one['internal_api']} {one['version']} {one.get('architecture', '')}".rstrip()
        for one in threadpool_info()
        if one["user_api"] == "blas"
    ]
    return Arithmetic(
        runner="numpy",
        device=", ".join(sorted(libraries)),
        weights="f32",
        kernels=f"NumPy {np.__version__}",
        model=file.digest()[:DIGITS],
    )
