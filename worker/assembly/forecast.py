"""The forecast of how much of a model fits a GPU, and of how fast it generates there.

`nightmill plan`, `check` and `models` ask `forecast` before anything is loaded. It is computed as the runner
shares out its memory (`gpu/planning.py`), so a worker's log says nearly the same, of what its runner took.
"""

from dataclasses import dataclass

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.sizes import runner_sizes
from nightmill.worker.assembly.speed import (
    EqualSequences,
    GpuSpeed,
    StepCost,
    WeightsAndCache,
    expected_rate,
    step_cost,
)
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.device.device import Device, NoDeviceError
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS, KnownCard
from nightmill.worker.runners.gpu.device.peaks import Peaks
from nightmill.worker.runners.gpu.kv_cache import PAGE, kinds_layout, page_bytes
from nightmill.worker.runners.gpu.memory import MemoryPlan, allowed
from nightmill.worker.runners.gpu.planning import RunnerPlanner
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.gpu.weights.choice import choose_weights

__all__ = [
    "CARDS", "GIB", "Card", "CountedStep", "Forecast", "Room", "card_here", "card_of", "counted_steps",
    "forecast", "forecast_of",
]  # fmt: skip

GIB = 1 << 30
LENGTHS = (1024, 4096)  # tokens of sequences, for which it is said how many fit
STEPS = (16, 64)  # sequences of steps that are counted, beside one and the most
_UNSEEN = " (which layers with a window keep, too)"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's room for a model: free bytes, multiprocessors, on which some workspace depends, and speed.

    hopper  kernels for Hopper run on it
    fp8     its tensor cores multiply FP8, if it is none
    block_shared  bytes of shared memory that a block may have
    """

    name: str
    free: int
    multiprocessors: int
    peaks: Peaks
    hopper: bool
    fp8: bool = False
    block_shared: int = 227 << 10

    def __str__(self) -> str:
        return f"{self.name}, {self.free / GIB:.1f} GiB free"


def card_of(known: KnownCard, name: str | None = None) -> Card:
    """A card that nothing else uses, by another name if one is given."""
    return Card(
        name or known.name, known.free, known.multiprocessors, known.peaks,
        hopper=known.features.hopper, fp8=known.features.fp8, block_shared=known.features.block_shared,
    )  # fmt: skip


CARDS = (
    card_of(KNOWN_CARDS["rtx4060"], "a card of 8 GB"),
    card_of(KNOWN_CARDS["rtx4090"], "a card of 24 GB"),
    card_of(KNOWN_CARDS["h100"], "a card of 80 GB"),
)
"""The cards to describe if there is no GPU: as fast as an RTX 4060, an RTX 4090 and an H100 SXM."""


def card_here(index: int | None, pretended: KnownCard | None = None) -> Card | None:
    """The GPU of this index, by default the first, with what is free of it now; None if none can be used.

    pretended  the card that it is taken for
    """
    try:
        with Device(0 if index is None else index, pretended=pretended) as device:
            free, peaks = device.free_memory(), device.peaks()
            return Card(
                device.name,
                free,
                device.multiprocessors,
                peaks,
                device.hopper,
                device.fp8,
                device.block_shared,
            )
    except NoDeviceError:
        return None


@dataclass(frozen=True, slots=True)
class Room:
    """The sequences that a cache has room for, and the rate to expect."""

    sequences: dict[int, int]
    """Numbers of sequences that fit at once, by their length in tokens: prompt and answer together."""
    rate: int
    """Output tokens per second to expect of those of the first length, a quarter of which is the answer."""

    def __str__(self) -> str:
        (length, count), *others = self.sequences.items()
        more = "".join(f", or {count:,} of {length:,}" for length, count in others)
        return (
            f"{count:,} sequences of {length:,} tokens at once{more}; about {self.rate:,} output tokens/s "
            f"with these {count:,}"
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """The shares of a GPU's memory, in bytes, and what the cache's share is in tokens and sequences.

    weights_in       the format in which weights are kept: never `auto`
    slots            sequences that run at once, at most: fewer than asked for where states take too much
    states           of layers that keep a state for each sequence, with copies of states that are kept
    sequences, rate  as in `Room`
    keeps_unseen     layers with a window keep the keys of tokens behind it, too: the kernels have one kind of
                     pages
    """

    weights: int
    weights_in: str
    workspace: int
    slots: int
    states: int
    cache_tokens: int
    sequences: dict[int, int]
    rate: int
    keeps_unseen: bool = False

    @property
    def room(self) -> Room:
        """The sequences that the cache has room for, and the rate."""
        return Room(self.sequences, self.rate)

    def __str__(self) -> str:
        kept = WeightsFormat(self.weights_in).words
        return (
            f"{self.weights / GIB:.2f} GiB of weights {kept}, {self.workspace / GIB:.2f} of workspace, "
            f"{f'{self.states / GIB:.2f} of states, ' if self.states else ''}and a cache of "
            f"{self.cache_tokens:,} tokens{_UNSEEN if self.keeps_unseen else ''}, for {self.room}"
        )


def forecast(spec: ModelSpec, card: Card, settings: Settings, precision: Precision = HALF) -> Forecast:
    """Forecast how a worker with these settings shares out that GPU's memory, to some percent.

    Raises RunnerError if the kernels do not take the model, or it does not fit, SettingsError for a context
    that the model cannot have.
    """
    sizes = runner_sizes(settings, spec)
    precision, _ = choose_weights(spec, precision, allowed(card.free, settings.gpu_memory))
    check_spec(spec, precision, card)
    planner = RunnerPlanner(spec, precision, card.multiprocessors, _about_so_many, hopper=card.hopper)
    speed, memory = GpuSpeed(card.peaks, card.multiprocessors), planner.plan(sizes, card.free).memory
    return forecast_of(spec, speed, precision, memory, context=sizes.context)


@dataclass(frozen=True, slots=True)
class CountedStep:
    """A step of so many sequences with contexts of so many tokens, counted."""

    sequences: int
    context: int
    cost: StepCost

    def __str__(self) -> str:
        cost, plural = self.cost, "" if self.sequences == 1 else "s"
        return (
            f"{self.sequences:,} sequence{plural} of {self.context:,} tokens: "
            f"{cost.weights / 1e9:,.2f} GB of weights, {cost.cache / 1e9:,.2f} of keys, values and states, "
            f"{cost.flops / 1e12:,.3f} TFLOP: "
            f"{cost.seconds * 1e3:.2g} ms, most of it for {cost.bound}"
        )


def counted_steps(
    spec: ModelSpec, card: Card, precision: Precision, weights: int, most: int
) -> list[CountedStep]:
    """Count steps of few and of many sequences that draw a token each, on that card.

    weights  their bytes in the format that the precision has, never `auto`
    most     sequences that fit
    """
    size = WeightsAndCache(weights, page_bytes(spec, precision.kv), precision.weights)
    speed, context = GpuSpeed(card.peaks, card.multiprocessors), min(LENGTHS[0], spec.context_length)
    counts = sorted({min(count, most) for count in (1, *STEPS, most) if most})
    return [CountedStep(count, context, step_cost(spec, speed, size, count, context)) for count in counts]


def _about_so_many(slots: int) -> int:
    """Pieces into which decode attention cuts contexts; for the bound, compiled kernels would be asked."""
    return slots


def forecast_of(
    spec: ModelSpec, gpu: GpuSpeed, precision: Precision, memory: MemoryPlan, *, context: int
) -> Forecast:
    """The forecast for a plan of memory, such as that of a runner.

    precision  as chosen, never `auto`
    context    the most tokens of a sequence
    """
    slots, pages, page = memory.states.slots, memory.kv_pages, page_bytes(spec, precision.kv)
    layout = kinds_layout(spec, precision.kv)

    def pages_of(length: int) -> int:
        """Return the pages that a sequence of so many tokens has."""
        return -(-length // PAGE) if layout is None else layout.pages_at(length)

    lengths = sorted({*(length for length in LENGTHS if length < context), context})
    sequences = {length: min(slots, pages // pages_of(length)) for length in lengths}
    length = lengths[0]
    load = EqualSequences(max(1, sequences[length]), prompt=length - length // 4, answer=length // 4)
    rate = expected_rate(spec, gpu, WeightsAndCache(memory.weights, page, precision.weights), load)
    return Forecast(
        weights=memory.weights,
        weights_in=precision.weights.value,
        workspace=memory.workspace,
        slots=slots,
        states=memory.states.bytes,
        cache_tokens=int(pages * LENGTHS[0] / pages_of(LENGTHS[0])),
        sequences=sequences,
        rate=int(float(f"{rate:.1e}")),  # two figures: more are not known
        keeps_unseen=layout is None and any((one.window or context) < context for one in spec.attentions),
    )
