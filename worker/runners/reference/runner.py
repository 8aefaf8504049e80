"""Runs steps on the CPU: what slots hold, the forward pass, and the tokens drawn."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_info

from nightmill.jobs.base.arithmetic import DIGITS, Arithmetic
from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.adjusting import Adjustment, adjustment_of
from nightmill.worker.runners.base import (
    FOUND,
    FROM_SLOT,
    NO_LOGPROBS,
    NOT_A_NUMBER,
    STATE_CHUNK,
    Admission,
    DrawArray,
    Drawn,
    IntArray,
    PoolArray,
    StepBatch,
    SumArray,
    mask_words,
    masked_draws,
    wants_logprobs,
)
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference.kv_cache import ReferenceKvCache
from nightmill.worker.runners.reference.model import ReferenceModel, Trace
from nightmill.worker.runners.reference.predicting import ReferencePredictor
from nightmill.worker.runners.reference.states import Flow, ReferenceStates, flow_of
from nightmill.worker.runners.sampling import (
    PARAMETERS,
    SamplingRows,
    apply_masks,
    log_probabilities,
    parameters_of,
    sample,
)

__all__ = ["ReferenceRunner", "Rounding"]

_GIVEN_ROWS = 64  # beside the draws of all slots; not less than STATE_CHUNK

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rounding:
    """The precision that a reference runner rounds to, as the kernels do.

    kv   the format of keys and values: rounded to it, stored as float32
    fp8  layers multiply FP8 numbers, as `model.Model` says
    """

    kv: KvFormat = KvFormat.ELEMENT
    fp8: bool = False


@dataclass(frozen=True, slots=True)
class _Undrawn:
    """A step whose tokens are not drawn: its hidden states, logits of its draws, embeddings it completed."""

    batch: StepBatch
    hidden: FloatArray
    logits: FloatArray
    sums: SumArray | None


class ReferenceRunner:
    """Runs steps on the CPU; `launch` or `draw` computes, `collect` hands out the result.

    file, spec       the model; weights are kept as float32
    kv_pages         pages, of `page_size` tokens, or more of a kind that keeps less of each; the memory is
                     only touched as they are used
    slots            sequences at once
    depth            launches that may be queued before one is collected
    rounding         the precision of keys, values and weights
    trace            told the stages of a step, as `model.Model` says
    """

    def __init__(
        self, file: GgufFile, spec: ModelSpec, *, kv_pages: int, page_size: int = 16, slots: int,
        depth: int = 1, rounding: Rounding = Rounding(), trace: Trace | None = None,
    ) -> None:  # fmt: skip
        kv, fp8 = rounding.kv, rounding.fp8
        self.kv_pages = kv_pages
        self.page_size = page_size
        self.slots = slots
        self.max_draws = slots + _GIVEN_ROWS
        self.depth = depth
        self.vocab = spec.vocab
        self.arithmetic = _arithmetic(file, "fp8 in f32" if fp8 else "f32", kv)
        self._cache = ReferenceKvCache(spec, pages=kv_pages, page_size=page_size, kv=kv)
        self.page_kinds = self._cache.layout.kinds
        self.embeds = True
        self.prompt_grid = STATE_CHUNK if spec.state_bytes else 1
        self.snapshots = slots if spec.state_bytes else 0
        self.states = ReferenceStates(spec, slots, self.snapshots)
        self._model = ReferenceModel(file, spec, self._cache, self.states, trace, fp8=fp8)
        self._file, self._spec = file, spec
        self._predictor: ReferencePredictor | None = None
        self.predicts = False
        self._last_token = np.zeros(slots, dtype=np.int32)
        self._parameters = np.zeros(slots, dtype=PARAMETERS)
        self._seen: list[npt.NDArray[np.bool_] | None] = [None] * slots
        self._adjustments: list[Adjustment | None] = [None] * slots
        self._sums = np.zeros((slots, spec.width))
        self._undrawn: _Undrawn | None = None
        self._results: deque[Drawn] = deque()

    def predict(self) -> None:
        """From now on guess what follows each draw, if the model has a block for that."""
        if self._spec.predictor is None:
            return
        predictor = ReferencePredictor(
            self._file, self._spec, self._model, pages=self.kv_pages, page_size=self.page_size
        )
        if predictor.kinds == self.page_kinds:
            self._predictor, self.predicts = predictor, True

    def launch(self, batch: StepBatch) -> None:
        """Compute a step and, unless it waits for masks, queue its tokens.

        Raises RunnerError where memory runs out.
        """
        if len(self._results) >= self.depth:
            raise RunnerError(f"{self.depth} launches are outstanding already: collect one first")
        if self._undrawn is not None:
            raise RunnerError("the newest launch waits for its masks")
        for admission in batch.admissions:
            self._admit(admission)
        for slot, snapshot in batch.restores:
            self.states.begin(slot, snapshot)
        for slot, snapshot in batch.keeps:
            self.states.save(slot, snapshot)
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # what is not a number is told by its token
                flow = flow_of(batch) if self.prompt_grid > 1 else Flow([], [])
                tokens = self._tokens(batch)
                places = self._cache.places(batch)
                hidden = self._model.forward(tokens, places, flow, batch.text_types)
                if self._predictor is not None:
                    self._predictor.read(batch, tokens, hidden)
                for slot, snapshot in batch.snapshots:
                    self.states.save(slot, snapshot)
                logits, sums = self._logits(hidden[batch.draws["row"]]), self._pool(batch.pools, hidden)
                undrawn = _Undrawn(batch, hidden, logits, sums)
                if len(masked_draws(batch.draws)):
                    self._undrawn = undrawn
                else:
                    self._results.append(self._sample(undrawn))
        except MemoryError as error:
            raise RunnerError(f"out of memory in a step of {len(batch.tokens)} tokens: {error}") from error

    def mask_room(self, count: int) -> IntArray:
        """An array for masks."""
        return np.empty((count, mask_words(self.vocab)), dtype=np.int32)

    def draw(self, masks: IntArray) -> None:
        """Queue the tokens of the newest launch. Raises RunnerError where it does not wait for masks."""
        if self._undrawn is None:
            raise RunnerError("no launch waits for masks")
        undrawn, self._undrawn = self._undrawn, None
        logits = apply_masks(undrawn.logits, undrawn.batch.draws, masks)
        with np.errstate(invalid="ignore", over="ignore"):
            self._results.append(self._sample(replace(undrawn, logits=logits)))

    def collect(self) -> Drawn | None:
        """Return the tokens of the oldest launch that was not yet collected."""
        if self._undrawn is not None and not self._results:
            raise RunnerError("the oldest launch waits for its masks")
        return self._results.popleft() if self._results else None

    def close(self) -> None:
        """Drop weights and cache."""
        self._model.close()
        self._cache.close()
        self.states.close()
        if self._predictor is not None:
            self._predictor.close()
        self._results.clear()

    def _admit(self, admission: Admission) -> None:
        slot, params = admission.slot, admission.params
        self.states.begin(slot, admission.snapshot)
        if self._predictor is not None:
            self._predictor.begin(slot)
        self._last_token[slot] = admission.token_ids[-1]
        self._parameters[slot] = parameters_of(admission)
        self._seen[slot] = None
        if params.repetition_penalty != 1.0:
            seen = np.zeros(self.vocab, dtype=np.bool_)
            seen[list(admission.token_ids)] = True
            self._seen[slot] = seen
        self._adjustments[slot] = adjustment_of(admission)

    def _tokens(self, batch: StepBatch) -> npt.NDArray[np.int32]:
        """The step's tokens (T,), those too that only the slots know."""
        slots = np.repeat(batch.slots, np.diff(batch.sequence_starts))
        return np.where(batch.tokens == FROM_SLOT, self._last_token[slots], batch.tokens)

    def _logits(self, hidden: npt.NDArray[Any]) -> FloatArray:
        """Compute the logits (R, V) of the rows that draw."""
        return self._model.logits(hidden) if len(hidden) else np.zeros((0, self.vocab), dtype=np.float32)

    def _pool(self, pools: PoolArray, hidden: npt.NDArray[Any]) -> SumArray | None:
        """Add hidden states (T, width) to the sums of slots; return the sums that are complete (E, width)."""
        complete = []
        for row, rows, slot, begins, ends in pools.tolist():
            total = self._sums[slot]
            if begins:
                total[:] = 0.0
            for state in hidden[row : row + rows]:
                total += state
            if ends:
                complete.append(total.copy())
        return np.array(complete) if complete else None

    def _sample(self, undrawn: "_Undrawn") -> Drawn:
        """Draw what is not given, tell log-probabilities to the rows that ask, and guess what follows."""
        logits, draws = undrawn.logits, undrawn.batch.draws
        given = draws["slot"] < 0
        rows = self._rows(draws)
        tokens = np.where(np.isfinite(logits.max(axis=1)), draws["given"], np.int32(NOT_A_NUMBER))
        drawing = np.flatnonzero(~given)
        tokens[drawing] = sample(logits[drawing], rows.of(drawing))
        found = None
        if wants_logprobs(draws):
            found = np.zeros(len(draws), dtype=FOUND)
            asking = np.flatnonzero(draws["likely"] != NO_LOGPROBS)
            found[asking] = log_probabilities(
                logits[asking], rows.of(asking), tokens[asking], draws["likely"][asking]
            )
        slots = draws["slot"][drawing]
        self._last_token[slots] = np.where(tokens[drawing] == NOT_A_NUMBER, 0, tokens[drawing])
        for row in drawing.tolist():
            seen, token = rows.seen[row], int(tokens[row])
            if token == NOT_A_NUMBER:
                self.states.clear(int(draws["slot"][row]))  # where NaN would stay for ever
                continue
            if seen is not None:
                seen[token] = True
            if (by := rows.adjusted.get(row)) is not None:
                by.answer.append(token)
        guesses = None
        if self._predictor is not None and undrawn.batch.guesses:
            guesses = self._predictor.guess(undrawn.batch, undrawn.hidden, tokens, rows)
        return Drawn(tokens, found, undrawn.sums, guesses)

    def _rows(self, draws: DrawArray) -> SamplingRows:
        """Collect the sampling rows of the draws (R,); given tokens have none."""
        slots = draws["slot"].tolist()
        return SamplingRows(
            self._parameters[slots],
            draws["position"].astype(np.int64),
            [None if slot < 0 else self._seen[slot] for slot in slots],
            {
                row: by
                for row, slot in enumerate(slots)
                if slot >= 0 and (by := self._adjustments[slot]) is not None
            },
        )


def _arithmetic(file: GgufFile, weights: str, kv: KvFormat) -> Arithmetic:
    """NumPy on its BLAS, and the processor that this has kernels for."""
    libraries = [
        f"{one['internal_api']} {one['version']} {one.get('architecture', '')}".rstrip()
        for one in threadpool_info()
        if one["user_api"] == "blas"
    ]
    return Arithmetic(
        runner="numpy",
        device=", ".join(sorted(libraries)),
        weights=weights,
        kv="f32" if kv is KvFormat.ELEMENT else kv.value,
        kernels=f"NumPy {np.__version__}",
        model=file.digest()[:DIGITS],
    )
