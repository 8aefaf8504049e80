"""A runner's sizes by what a GPU has free: steps, sequences with their states, and pages.

So is the forecast of what a GPU can serve (`worker.assembly.forecast`), which asks no device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from nightmill.worker.model.spec import ModelSpec, Pooling
from nightmill.worker.runners.base import STATE_CHUNK
from nightmill.worker.runners.gpu.activations import LOGIT_ROWS, most_draws
from nightmill.worker.runners.gpu.attention.choice import by_heads
from nightmill.worker.runners.gpu.catalogue import workspace_bytes
from nightmill.worker.runners.gpu.kinds import has_tail
from nightmill.worker.runners.gpu.kv_cache import PAGE, kinds_layout, page_bytes, pool_page_bytes
from nightmill.worker.runners.gpu.memory import (
    LEAST_TOKENS,
    MemoryPlan,
    RunnerSizes,
    allowed,
    plan_memory,
    plan_states,
    spare_pages,
    tokens_of_a_step,
)
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.rows.pooling import PooledSums
from nightmill.worker.runners.gpu.rows.predictor import PredictorRows
from nightmill.worker.runners.gpu.sampling.masks import MaskBuffers
from nightmill.worker.runners.gpu.sampling.slots import SlotTable
from nightmill.worker.runners.gpu.states.memory import States
from nightmill.worker.runners.gpu.steps import StepBounds, StepBuffers
from nightmill.worker.runners.gpu.weights.layout import predictor_bytes, predictor_precision, weight_bytes
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["RunnerPlanner", "RunnerPlan", "prompt_grid", "takes_tail"]


def prompt_grid(spec: ModelSpec) -> int:
    """Positions at multiples of which pieces of prompts end (`Runner.prompt_grid`)."""
    return STATE_CHUNK if spec.state_bytes else 1


def takes_tail(spec: ModelSpec, precision: Precision) -> bool:
    """Return whether rows that draw go on alone behind the last layer that keeps anything.

    Not where pages become elements first, which a step does once.
    """
    return precision.kv is KvFormat.ELEMENT and has_tail(spec)


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """The shares of the memory, and the bounds of a step, of which slots may be fewer than asked for."""

    memory: MemoryPlan
    bounds: StepBounds


@dataclass(frozen=True, slots=True)
class RunnerPlanner:
    """Plans for a model and a GPU.

    hopper       kernels for Hopper run on it
    most_pieces  of contexts, by slots (`AttentionPlans.most_pieces`)
    predicts     there is memory for the model's block that predicts further tokens, too
    """

    spec: ModelSpec
    precision: Precision
    multiprocessors: int
    most_pieces: Callable[[int], int]
    hopper: bool = True
    predicts: bool = False

    def plan(self, sizes: RunnerSizes, free: int) -> RunnerPlan:
        """Share out `free` bytes; `sizes.context` is no more than the model's.

        Raises DeviceMemoryError where the model does not fit.
        """
        spec, precision, slots = self.spec, self.precision, sizes.slots
        weights, page = weight_bytes(spec, precision), pool_page_bytes(spec, precision.kv)
        if self.predicts:
            assert spec.predictor is not None
            own = predictor_precision(spec, precision)
            assert own is not None
            weights += predictor_bytes(spec, own)
            page += page_bytes(spec.predictor.model(spec), precision.kv)
        room = allowed(free, sizes.gpu_memory) - weights
        tokens = sizes.max_tokens
        if sizes.kv_pages is None:
            least = max(slots - 1 + prompt_grid(spec), LEAST_TOKENS)
            if spec.encoder is not None:  # whose texts are computed whole
                least = max(least, sizes.context)
            layout = kinds_layout(spec, precision.kv)
            pages = -(-sizes.context // PAGE) if layout is None else layout.pages_for(sizes.context)
            tokens = tokens_of_a_step(
                tokens, least, lambda tokens: self._workspace(sizes, tokens), room,
                (slots * pages + spare_pages(layout)) * page + States.bytes(spec, slots, 0),
            )  # fmt: skip
        sizes = replace(sizes, max_tokens=tokens)
        room -= self._workspace(sizes, tokens)
        states = plan_states(sizes, page=page, room=room, bytes_of=partial(States.bytes, spec))
        sizes = replace(sizes, slots=states.slots)
        memory = plan_memory(
            sizes, weights=weights, page=page, free=free, workspace=self._workspace(sizes, tokens),
            states=states, layout=kinds_layout(spec, precision.kv),
        )  # fmt: skip
        return RunnerPlan(memory, self.bounds(sizes))

    def bounds(self, sizes: RunnerSizes) -> StepBounds:
        """The bounds of a step of these sizes."""
        slots, grid = sizes.slots, prompt_grid(self.spec)
        ranking = self.spec.ranking
        pools = self.spec.pooling is Pooling.MEAN or (ranking is not None and ranking.mean)
        given = sizes.max_tokens if self.spec.encoder is not None else grid
        draws = most_draws(slots, given, pools=pools) if sizes.max_draws is None else sizes.max_draws
        layout = kinds_layout(self.spec, self.precision.kv)
        return StepBounds(
            max_tokens=sizes.max_tokens,
            max_draws=max(draws, slots),
            slots=slots,
            table_width=-(-sizes.context // PAGE),
            max_pieces=self.most_pieces(slots),
            states=grid > 1,
            strides=(1,) if layout is None else tuple(kind.stride for kind in layout.kinds),
            plans=max(1, sum(1 for _ in by_heads(self.spec))),
            paired=self.spec.paired_positions,
        )

    def _workspace(self, sizes: RunnerSizes, max_tokens: int) -> int:
        """Bytes for steps of up to so many tokens, and of what sampling keeps of slots."""
        slots, vocab = sizes.slots, self.spec.vocab
        bounds = self.bounds(replace(sizes, max_tokens=max_tokens))
        kept = SlotTable.bytes(slots, vocab) + MaskBuffers.bytes(vocab, LOGIT_ROWS)
        kept += PooledSums.bytes(slots, self.spec.width)
        if self.predicts:
            kept += PredictorRows.workspace(
                self.spec.width, tokens=bounds.max_tokens, draws=bounds.max_draws,
                table_width=bounds.table_width,
            )  # fmt: skip
        if takes_tail(self.spec, self.precision):
            kept += StepBuffers.bytes(bounds.tail)
        return kept + StepBuffers.bytes(bounds) + workspace_bytes(
            self.spec, self.precision, self.multiprocessors, slots=slots, max_context=sizes.context,
            max_tokens=max_tokens, max_draws=bounds.max_draws, hopper=self.hopper,
        )  # fmt: skip
