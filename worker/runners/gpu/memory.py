"""Decides what goes where in the GPU's memory before anything is loaded.

Weights, workspace, the states of sequences, and what is left is for KV pages.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nightmill.worker.runners.gpu.device.device import DeviceMemoryError
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.page_layout import PageLayout

__all__ = [
    "LEAST_TOKENS", "MemoryPlan", "RunnerSizes", "StatePlan", "allowed", "plan_memory", "plan_states",
    "spare_pages",
    "tokens_of_a_step",
]  # fmt: skip

LEAST_TOKENS = 2048
"""Tokens of a step below which its limit is not lowered if memory is short (`tokens_of_a_step`)."""
_LEAST_PAGES = 16
_SNAPSHOT_SHARE = 4  # slots for each of which a snapshot is kept
_EXPECTED_TOKENS = 1024  # of a sequence, for which a slot that takes memory is to find pages
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    """Sizes of a runner: how much it computes at once, and how much memory it may use.

    slots       sequences at once
    context     the most tokens of a sequence; not more than the model's limit are used
    depth       launches that may be outstanding
    max_tokens  the most tokens of a step; at least `slots`. Fewer, if memory is short and `kv_pages` is None
    max_draws   the most rows that draw in a step, by default `slots`
    kv_pages   pages of the KV cache; None: as many as `gpu_memory` allows
    gpu_memory  share of the free memory that may be used, or, an int, its bytes
    predicts    the model's block that predicts further tokens is loaded, if it has one that kernels compute
    """

    slots: int
    context: int
    depth: int = 2
    max_tokens: int = 8192
    max_draws: int | None = None
    kv_pages: int | None = None
    gpu_memory: float = 0.9
    predicts: bool = False


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Sequences at once, whose states fit, and snapshots of states; none if a model has no states.

    bytes  that these take
    binds  there would be more sequences if states were smaller
    """

    slots: int
    snapshots: int = 0
    bytes: int = 0
    binds: bool = False

    def __str__(self) -> str:
        states = f"states of {_counted(self.slots, 'sequence')} and {_counted(self.snapshots, 'snapshot')}"
        return f"{states} (as many as there is memory for)" if self.binds else states


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. `free` was free before, `budget` of it may be used."""

    weights: int
    workspace: int
    cache: int
    kv_pages: int
    budget: int
    free: int
    states: StatePlan = StatePlan(0)

    def __str__(self) -> str:
        states = self.states
        rest = self.free - self.weights - self.workspace - self.cache - states.bytes
        parts = {
            "weights": self.weights,
            "workspace": self.workspace,
            **({str(states): states.bytes} if states.bytes else {}),
            f"KV cache of {self.kv_pages:,} pages": self.cache,
            "left free": rest,
        }
        return ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in parts.items())


def allowed(free: int, gpu_memory: float) -> int:
    """Bytes that may be used of `free`: such a share, or, where it is an int, so many."""
    return min(gpu_memory, free) if isinstance(gpu_memory, int) else int(free * gpu_memory)


def tokens_of_a_step(most: int, least: int, workspace: Callable[[int], int], room: int, wanted: int) -> int:
    """Choose the most tokens of a step: `most`, or fewer if memory is short.

    It is halved, but not below `least`, while the workspace of such steps takes more than a quarter of
    `room`, which is what the weights leave; and while it leaves less than the `wanted` bytes of whole
    contexts, if these fit beside that of smaller steps. Texts are the same to the bit: prompts come in more
    pieces.
    """
    choices = [most]
    while choices[-1] // 2 >= least:
        choices.append(choices[-1] // 2)
    few = next((one for one in choices if workspace(one) <= room // 4), choices[-1])
    return next((one for one in choices if one <= few and workspace(one) + wanted <= room), few)


def plan_states(
    sizes: RunnerSizes, *, page: int, room: int, bytes_of: Callable[[int, int], int]
) -> StatePlan:
    """Choose how many sequences have states: `sizes.slots`, or fewer, if they would leave too few pages.

    page      bytes of a page of the KV cache (`page_bytes`)
    room      bytes that weights and workspace leave
    bytes_of  what states of so many slots and snapshots take; 0: the model has none

    Of the fewest, one, nobody says here that it does not fit: `plan_memory` does.
    """
    if not bytes_of(1, 0):
        return StatePlan(sizes.slots)

    def taken(slots: int) -> int:
        pages = -(-min(sizes.context, _EXPECTED_TOKENS) // PAGE) if sizes.kv_pages is None else 0
        return bytes_of(slots, _snapshots(slots)) + slots * pages * page

    fixed = 0 if sizes.kv_pages is None else sizes.kv_pages * page
    fewest, most = 1, sizes.slots
    while fewest < most:  # the most that fit lie between
        tried = (fewest + most + 1) // 2
        fewest, most = (tried, most) if taken(tried) + fixed <= room else (fewest, tried - 1)
    snapshots = _snapshots(fewest)
    return StatePlan(fewest, snapshots, bytes_of(fewest, snapshots), fewest < sizes.slots)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _snapshots(slots: int) -> int:
    return -(-slots // _SNAPSHOT_SHARE)


def plan_memory(
    sizes: RunnerSizes, *, weights: int, page: int, free: int, workspace: int,
    states: StatePlan | None = None, layout: PageLayout | None = None,
) -> MemoryPlan:  # fmt: skip
    """Plan for what `sizes.gpu_memory` allows of `free` bytes.

    sizes      more pages than all slots can fill are not taken
    weights    bytes that they take (`weight_bytes`)
    page       bytes of a page of the KV cache (`pool_page_bytes`)
    workspace  bytes of activations, of what kernels ask for, and of what sampling keeps of slots
    states     of layers that have such, as `plan_states` planned them
    layout     of pages of several kinds; None: there is one kind

    Raises DeviceMemoryError, with the numbers and the settings to change, where that cannot fit.
    """
    gpu_memory, kv_pages = sizes.gpu_memory, sizes.kv_pages
    budget = allowed(free, gpu_memory)
    states = StatePlan(sizes.slots) if states is None else states
    spare = spare_pages(layout)
    room = (budget - weights - workspace - states.bytes) // page - spare
    each = -(-sizes.context // PAGE) if layout is None else layout.pages_for(sizes.context)
    wanted = sizes.slots * each if kv_pages is None else kv_pages
    least = min(wanted, _LEAST_PAGES) if kv_pages is None else kv_pages
    if room < least:
        raise DeviceMemoryError(
            f"the model does not fit: weights {weights:,} bytes, workspace {workspace:,} (for steps of "
            f"{sizes.max_tokens:,} tokens), {f'{states} {states.bytes:,}, ' if states.bytes else ''}"
            f"at least {least} KV pages of {page:,}; {free:,} bytes are free, "
            f"of which --gpu-memory {gpu_memory:,} allows {budget:,}. Lower --max-sequences or --context, "
            "raise --gpu-memory, or end what else runs on this GPU"
        )
    pages = min(wanted, room)
    return MemoryPlan(weights, workspace, (pages + spare) * page, pages, budget, free, states)


def spare_pages(layout: PageLayout | None) -> int:
    """Pages behind the last: one that padding is written to, before it one of zeros if there are kinds."""
    return 1 if layout is None else 2
