"""Sizes a runner for a model and a GPU: sequences, tokens of a step, and what takes how much of the memory.

The runner asks before it loads anything; whoever forecasts asks the same, without a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import STATE_CHUNK
from nightmill.worker.runners.gpu.activations import LOGIT_ROWS, most_draws
from nightmill.worker.runners.gpu.catalogue import workspace_bytes
from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
from nightmill.worker.runners.gpu.memory import (
    LEAST_TOKENS,
    MemoryPlan,
    RunnerSizes,
    allowed,
    plan_memory,
    plan_states,
    tokens_of_a_step,
)
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.sampling.masks import MaskBuffers
from nightmill.worker.runners.gpu.sampling.slots import SlotTable
from nightmill.worker.runners.gpu.states.memory import States
from nightmill.worker.runners.gpu.steps import StepBuffers
from nightmill.worker.runners.gpu.weights.layout import weight_bytes

__all__ = ["GpuMemory", "SizedRunner", "prompt_grid", "size_runner"]

_MOST_ROWS = 65_535  # of a grid: attention has a row of blocks for each piece of a context, and of a prompt


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU as far as the memory that a model takes hangs on it; `free` in bytes."""

    free: int
    multiprocessors: int
    hopper: bool


@dataclass(frozen=True, slots=True)
class SizedRunner:
    """The sizes that a runner has, and its plan of memory.

    sizes      as asked for, with fewer slots and tokens of a step where memory is short, and all draws
    snapshots  copies of states that are kept beside those of the slots
    """

    sizes: RunnerSizes
    max_draws: int
    snapshots: int
    memory: MemoryPlan


def prompt_grid(spec: ModelSpec) -> int:
    """The positions of which pieces of prompts begin at multiples: 1 where layers have no states."""
    return STATE_CHUNK if spec.state_bytes else 1


def size_runner(
    spec: ModelSpec,
    precision: Precision,
    sizes: RunnerSizes,
    gpu: GpuMemory,
    most_pieces: Callable[[int], int],
) -> SizedRunner:
    """Share out a GPU's memory for a model.

    precision    as chosen, never `auto`
    sizes        what is asked for; its context is at most the model's
    most_pieces  into how many pieces decode attention cuts the contexts of so many sequences, at most

    Raises RunnerError where a launch would be larger than a GPU takes, DeviceMemoryError where nothing fits.
    """
    slots, most, grid = sizes.slots, sizes.max_tokens, prompt_grid(spec)
    rows = max(most, most_pieces(slots))
    if rows > _MOST_ROWS:
        raise RunnerError(
            f"{slots:,} sequences in steps of up to {most:,} tokens may need {rows:,} "
            f"rows of blocks in one launch; a GPU takes {_MOST_ROWS:,}: lower --max-sequences"
        )

    def draws_of(slots: int) -> int:
        return max(most_draws(slots, grid) if sizes.max_draws is None else sizes.max_draws, slots)

    def workspace(max_tokens: int, slots: int = slots) -> int:
        draws = draws_of(slots)
        step = StepBuffers.bytes(
            max_tokens=max_tokens, max_draws=draws, slots=slots, table_width=-(-sizes.context // PAGE),
            max_pieces=most_pieces(slots), states=spec.state_bytes > 0,
        )  # fmt: skip
        kept = SlotTable.bytes(slots, spec.vocab) + MaskBuffers.bytes(spec.vocab, LOGIT_ROWS)
        return step + kept + workspace_bytes(
            spec, precision, gpu.multiprocessors, slots=slots, max_context=sizes.context,
            max_tokens=max_tokens, max_draws=draws, hopper=gpu.hopper,
        )  # fmt: skip

    weights, page = weight_bytes(spec, precision), page_bytes(spec, precision.kv)
    room = allowed(gpu.free, sizes.gpu_memory) - weights
    if sizes.kv_pages is None:
        least = max(slots - 1 + grid, LEAST_TOKENS)
        sizes = replace(sizes, max_tokens=tokens_of_a_step(most, least, workspace, room))
    room -= workspace(sizes.max_tokens)
    states = plan_states(sizes, page=page, room=room, bytes_of=partial(States.bytes, spec))
    sizes = replace(sizes, slots=states.slots)
    memory = plan_memory(
        sizes, weights=weights, page=page, free=gpu.free,
        workspace=workspace(sizes.max_tokens, states.slots), states=states,
    )  # fmt: skip
    return SizedRunner(sizes, draws_of(states.slots), states.snapshots, memory)
