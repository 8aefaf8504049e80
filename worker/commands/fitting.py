"""What of a model fits a GPU: its weights, what it computes in, and the tokens of cache that are left."""

from dataclasses import dataclass

from nightmill.jobs.settings import Settings
from nightmill.worker.link.loading import GPU_CONTEXT, GPU_MAX_SEQUENCES, GPU_TOKEN_BUDGET
from nightmill.worker.model.spec import ModelSpec

GIB = 1 << 30
LENGTHS = (1024, 4096)  # tokens of sequences, for which it is said how many fit
_FREE_SHARE = 0.95  # of a card's memory, before Nightmill comes: the driver and its context have the rest


@dataclass(frozen=True, slots=True)
class Card:
    """What a GPU has for a model: bytes, and multiprocessors, on which some workspace depends."""

    name: str
    free: int
    multiprocessors: int

    def __str__(self) -> str:
        return f"{self.name}, {self.free / GIB:.1f} GiB free"


def card_of(name: str, gib: int, multiprocessors: int) -> Card:
    """A GPU of this memory that nothing else uses."""
    return Card(name, int(gib * GIB * _FREE_SHARE), multiprocessors)


CARDS = (
    card_of("a card of 8 GB", 8, 24),
    card_of("a card of 24 GB", 24, 128),
    card_of("a card of 80 GB", 80, 132),
)
"""What is said of, where there is no GPU."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How a GPU's memory is shared out, in bytes, and what that is in tokens and sequences."""

    weights: int
    workspace: int
    cache_tokens: int
    sequences: dict[int, int]
    """How many fit at once, by their length in tokens: prompt and answer together."""

    def __str__(self) -> str:
        (length, count), *others = self.sequences.items()
        more = "".join(f", or {count:,} of {length:,}" for length, count in others)
        return (
            f"{self.weights / GIB:.2f} GiB of weights, {self.workspace / GIB:.2f} of workspace, and a cache "
            f"of {self.cache_tokens:,} tokens, for {count:,} sequences of {length:,} tokens at once{more}"
        )


def card_here(index: int | None) -> Card | None:
    """The GPU of this index, by default the first, with what is free of it now; None if none can be used."""
    from nightmill.worker.runners.gpu.device.device import Device, NoDeviceError

    try:
        with Device(index or 0) as device:
            return Card(device.name, device.free_memory(), device.multiprocessors)
    except NoDeviceError:
        return None


def fit(spec: ModelSpec, card: Card, settings: Settings) -> Fit:
    """What a worker with these settings has on that GPU, to some percent.

    Raises RunnerError if the kernels do not take the model, or it does not fit.
    """
    from nightmill.worker.runners.gpu.activations import LOGIT_ROWS
    from nightmill.worker.runners.gpu.catalogue import check_spec, workspace_bytes
    from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
    from nightmill.worker.runners.gpu.memory import LEAST_TOKENS, allowed, plan_memory, tokens_of_a_step
    from nightmill.worker.runners.gpu.sampling.masks import MaskBuffers
    from nightmill.worker.runners.gpu.sampling.slots import SlotTable
    from nightmill.worker.runners.gpu.weights.layout import weight_bytes

    check_spec(spec)
    slots = settings.max_sequences or GPU_MAX_SEQUENCES
    context = min(settings.context or GPU_CONTEXT, spec.context_length)
    kept = SlotTable.bytes(slots, spec.vocab) + MaskBuffers.bytes(spec.vocab, LOGIT_ROWS)

    def workspace(max_tokens: int) -> int:
        return kept + workspace_bytes(
            spec, card.multiprocessors, max_context=context, max_tokens=max_tokens, max_draws=slots
        )

    weights = weight_bytes(spec)
    room = allowed(card.free, settings.gpu_memory) - weights
    most, least = max(GPU_TOKEN_BUDGET, slots), max(LEAST_TOKENS, slots)
    tokens = tokens_of_a_step(most, least, workspace, room)
    plan = plan_memory(
        weights=weights,
        page=page_bytes(spec),
        free=card.free,
        gpu_memory=settings.gpu_memory,
        slots=slots,
        context=context,
        max_tokens=tokens,
        workspace=workspace(tokens),
    )
    lengths = sorted({*(length for length in LENGTHS if length < context), context})
    return Fit(
        plan.weights,
        plan.workspace,
        plan.kv_blocks * PAGE,
        {length: min(slots, plan.kv_blocks // -(-length // PAGE)) for length in lengths},
    )
