"""What of a model fits a GPU: its weights, what it computes in, and the tokens of cache that are left."""

from dataclasses import dataclass

from nightmill.jobs.settings import Settings
from nightmill.worker.link.loading import GPU_CONTEXT, GPU_MAX_SEQUENCES, GPU_TOKEN_BUDGET
from nightmill.worker.link.speed import Room, room_of
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.peaks import Peaks
from nightmill.worker.runners.gpu.numbers import HALF, Numbers, WeightNumbers

GIB = 1 << 30
_FREE_SHARE = 0.95  # of a card's memory, before Nightmill comes: the driver and its context have the rest


@dataclass(frozen=True, slots=True)
class Card:
    """What a GPU has for a model: bytes, multiprocessors, on which some workspace depends, and its speed."""

    name: str
    free: int
    multiprocessors: int
    peaks: Peaks

    def __str__(self) -> str:
        return f"{self.name}, {self.free / GIB:.1f} GiB free"


def card_of(name: str, gib: int, multiprocessors: int, peaks: Peaks) -> Card:
    """A GPU of this memory that nothing else uses."""
    return Card(name, int(gib * GIB * _FREE_SHARE), multiprocessors, peaks)


CARDS = (
    card_of("a card of 8 GB", 8, 24, Peaks(0.272e12, 30e12)),
    card_of("a card of 24 GB", 24, 128, Peaks(1.008e12, 165e12)),
    card_of("a card of 80 GB", 80, 132, Peaks(3.35e12, 989e12)),
)
"""What is said of, where there is no GPU: as fast as an RTX 4060, an RTX 4090 and an H100 SXM."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How a GPU's memory is shared out, in bytes, and what that is in tokens and sequences."""

    weights: int
    weights_in: str
    """How they are kept: never `auto`."""
    workspace: int
    cache_tokens: int
    sequences: dict[int, int]
    """As `Room` has them, and the rate."""
    rate: int

    def __str__(self) -> str:
        kept = WeightNumbers(self.weights_in).words
        return (
            f"{self.weights / GIB:.2f} GiB of weights {kept}, {self.workspace / GIB:.2f} of workspace, and a "
            f"cache of {self.cache_tokens:,} tokens, for {Room(self.sequences, self.rate)}"
        )


def card_here(index: int | None) -> Card | None:
    """The GPU of this index, by default the first, with what is free of it now; None if none can be used."""
    from nightmill.worker.runners.gpu.device.device import Device, NoDeviceError

    try:
        with Device(0 if index is None else index) as device:
            return Card(device.name, device.free_memory(), device.multiprocessors, device.peaks())
    except NoDeviceError:
        return None


def fit(spec: ModelSpec, card: Card, settings: Settings, numbers: Numbers = HALF) -> Fit:
    """What a worker with these settings has on that GPU, to some percent.

    Raises RunnerError if the kernels do not take the model, or it does not fit.
    """
    from nightmill.worker.runners.gpu.activations import LOGIT_ROWS, most_draws
    from nightmill.worker.runners.gpu.catalogue import check_spec, workspace_bytes
    from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
    from nightmill.worker.runners.gpu.memory import LEAST_TOKENS, allowed, plan_memory, tokens_of_a_step
    from nightmill.worker.runners.gpu.sampling.masks import MaskBuffers
    from nightmill.worker.runners.gpu.sampling.slots import SlotTable
    from nightmill.worker.runners.gpu.steps import StepBuffers
    from nightmill.worker.runners.gpu.weights.choice import choose_weights
    from nightmill.worker.runners.gpu.weights.layout import weight_bytes

    budget = allowed(card.free, settings.gpu_memory)
    numbers, _ = choose_weights(spec, numbers, budget)
    check_spec(spec, numbers)
    slots = settings.max_sequences or GPU_MAX_SEQUENCES
    context = min(settings.context or GPU_CONTEXT, spec.context_length)
    kept = SlotTable.bytes(slots, spec.vocab) + MaskBuffers.bytes(spec.vocab, LOGIT_ROWS)

    def workspace(max_tokens: int) -> int:
        step = StepBuffers.bytes(
            max_tokens=max_tokens, max_draws=most_draws(slots), slots=slots, table_width=-(-context // PAGE),
            max_pieces=slots,  # about so many; by the kernels' occupancy, for which a device is asked
        )  # fmt: skip
        return (
            kept
            + step
            + workspace_bytes(
                spec,
                numbers,
                card.multiprocessors,
                slots=slots,
                max_context=context,
                max_tokens=max_tokens,
                max_draws=most_draws(slots),
            )
        )

    weights, page = weight_bytes(spec, numbers), page_bytes(spec, numbers.kv)
    most, least = max(GPU_TOKEN_BUDGET, slots), max(LEAST_TOKENS, slots)
    tokens = tokens_of_a_step(most, least, workspace, budget - weights)
    plan = plan_memory(
        weights=weights,
        page=page,
        free=card.free,
        gpu_memory=settings.gpu_memory,
        slots=slots,
        context=context,
        max_tokens=tokens,
        workspace=workspace(tokens),
    )
    room = room_of(
        spec, card.peaks, card.multiprocessors, weights=weights, page=page, pages=plan.kv_blocks,
        kept=numbers.weights, slots=slots, context=context,
    )  # fmt: skip
    return Fit(
        weights=plan.weights,
        weights_in=numbers.weights.value,
        workspace=plan.workspace,
        cache_tokens=plan.kv_blocks * PAGE,
        sequences=room.sequences,
        rate=room.rate,
    )
