"""Sizes of a model's work: sequences, tokens and formats by the settings, and how much of it fits a GPU."""

from dataclasses import dataclass, replace
from functools import partial

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import SettingsError
from nightmill.worker.assembly.speed import GpuSpeed, Room, WeightsAndCache, room_of
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import STATE_CHUNK
from nightmill.worker.runners.gpu.device.device import device_count
from nightmill.worker.runners.gpu.device.peaks import Peaks
from nightmill.worker.runners.gpu.element_choice import choose_element
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.kv_format import KvFormat


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """The sizes that a kind of device has unless the settings name others.

    sequences      computed at once
    step_tokens    the most tokens of a step
    context        the most tokens of a sequence, if the model takes so many
    hang_seconds   silence after which its engine counts as hung; an engine answers between two steps
    """

    sequences: int
    step_tokens: int
    context: int
    hang_seconds: float

    def tokens_of_a_step(self, sequences: int) -> int:
        """The most tokens of a step of so many sequences, each of which may draw one."""
        return max(self.step_tokens, sequences)


# The reference runner is bound by arithmetic: more sequences or longer chunks only use more memory. With
# NumPy 512 tokens through 7 billion weights are 7 TFLOP, minutes on one core; on a GPU a step takes
# milliseconds, the first of a kind some seconds.
REFERENCE = DeviceDefaults(sequences=32, step_tokens=512, context=4096, hang_seconds=600.0)
GPU = DeviceDefaults(sequences=2048, step_tokens=16384, context=32768, hang_seconds=60.0)
GPU_DEPTH = 3  # launches outstanding: the GPU works on one, one waits, the host prepares the third
PAGE_SIZE = 16
INTERACTIVE_SHARE = 16
"""One in so many of a worker's slots is reserved for interactive jobs. 2,048 sequences at once are 1% faster
than 1,920; with none reserved, an interactive job would first wait for the end of another's answer."""
GIB = 1 << 30
_FREE_SHARE = 0.95  # of a card's memory, before Nightmill comes: the driver and its context have the rest


def gpu_index(settings: Settings) -> int | None:
    """The GPU to generate on: the one that is named, else the first there is; None: the reference runner."""
    if settings.reference:
        return None
    if settings.gpu is not None:
        return settings.gpu
    return 0 if device_count() else None


def defaults_of(settings: Settings) -> DeviceDefaults:
    """The defaults of the device that these settings generate on."""
    return REFERENCE if gpu_index(settings) is None else GPU


def max_sequences(settings: Settings) -> int:
    """Sequences to generate at once."""
    return settings.max_sequences or defaults_of(settings).sequences


def interactive_slots(settings: Settings) -> int:
    """Slots that only interactive jobs may have: a sixteenth of the sequences, if there are two or more."""
    running = max_sequences(settings)
    return max(1, running // INTERACTIVE_SHARE) if running > 1 else 0


def capacity(settings: Settings) -> int:
    """Jobs that a worker claims at once: what runs, and enough to refill it while the next are claimed."""
    running = max_sequences(settings)
    return running + max(4, running // 2)


def hang_seconds(settings: Settings) -> float:
    """Silence after which an engine counts as hung."""
    return defaults_of(settings).hang_seconds if settings.hang_seconds is None else settings.hang_seconds


def context_length(settings: Settings, spec: ModelSpec) -> int:
    """Tokens that a sequence may have; raises SettingsError where the model cannot have so many."""
    if settings.context is None:
        return min(spec.context_length, defaults_of(settings).context)
    if settings.context > spec.context_length:
        raise SettingsError(
            f"--context {settings.context} is more than the {spec.context_length} tokens that the model "
            "was made for"
        )
    return settings.context


def precision_of(settings: Settings, file: GgufFile, spec: ModelSpec) -> Precision:
    """The formats that a GPU computes and keeps a model in."""
    element = choose_element(file, spec, settings.dtype).element
    return Precision(element, WeightsFormat(settings.weights), KvFormat(settings.kv))


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's room for a model: free bytes, multiprocessors, on which some workspace depends, and speed."""

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
"""The cards to describe if there is no GPU: as fast as an RTX 4060, an RTX 4090 and an H100 SXM."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The shares of a GPU's memory, in bytes, and what the cache's share is in tokens and sequences."""

    weights: int
    weights_in: str
    """The format in which weights are kept: never `auto`."""
    workspace: int
    states: int
    """Of layers that keep a state for each sequence, with copies of states that are kept."""
    cache_tokens: int
    sequences: dict[int, int]
    """Sequences that fit at once, by length in tokens, as in `Room`; so is `rate`, in output tokens/s."""
    rate: int

    def __str__(self) -> str:
        kept = WeightsFormat(self.weights_in).words
        return (
            f"{self.weights / GIB:.2f} GiB of weights {kept}, {self.workspace / GIB:.2f} of workspace, "
            f"{f'{self.states / GIB:.2f} of states, ' if self.states else ''}and a cache of "
            f"{self.cache_tokens:,} tokens, for {Room(self.sequences, self.rate)}"
        )


def card_here(index: int | None) -> Card | None:
    """The GPU of this index, by default the first, with what is free of it now; None if none can be used."""
    from nightmill.worker.runners.gpu.device.device import Device, NoDeviceError

    try:
        with Device(0 if index is None else index) as device:
            return Card(device.name, device.free_memory(), device.multiprocessors, device.peaks())
    except NoDeviceError:
        return None


def fit(spec: ModelSpec, card: Card, settings: Settings, precision: Precision = HALF) -> Fit:
    """Forecast how a worker with these settings shares out that GPU's memory, to some percent.

    Raises RunnerError if the kernels do not take the model, or it does not fit.
    """
    from nightmill.worker.runners.gpu.activations import LOGIT_ROWS, most_draws
    from nightmill.worker.runners.gpu.catalogue import check_spec, workspace_bytes
    from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
    from nightmill.worker.runners.gpu.memory import (
        LEAST_TOKENS,
        RunnerSizes,
        allowed,
        plan_memory,
        plan_states,
        tokens_of_a_step,
    )
    from nightmill.worker.runners.gpu.sampling.masks import MaskBuffers
    from nightmill.worker.runners.gpu.sampling.slots import SlotTable
    from nightmill.worker.runners.gpu.states.memory import States
    from nightmill.worker.runners.gpu.steps import StepBuffers
    from nightmill.worker.runners.gpu.weights.choice import choose_weights
    from nightmill.worker.runners.gpu.weights.layout import weight_bytes

    budget = allowed(card.free, settings.gpu_memory)
    precision, _ = choose_weights(spec, precision, budget)
    check_spec(spec, precision)
    slots = settings.max_sequences or GPU.sequences
    context = min(settings.context or GPU.context, spec.context_length)
    grid = STATE_CHUNK if spec.state_bytes else 1

    def workspace(max_tokens: int, slots: int = slots) -> int:
        draws = most_draws(slots, grid)
        step = StepBuffers.bytes(
            max_tokens=max_tokens, max_draws=draws, slots=slots, table_width=-(-context // PAGE),
            max_pieces=slots,  # about so many; by the kernels' occupancy, for which a device is asked
            states=grid > 1,
        )  # fmt: skip
        kept = SlotTable.bytes(slots, spec.vocab) + MaskBuffers.bytes(spec.vocab, LOGIT_ROWS)
        return kept + step + workspace_bytes(
            spec, precision, card.multiprocessors, slots=slots, max_context=context, max_tokens=max_tokens,
            max_draws=draws,
        )  # fmt: skip

    weights, page = weight_bytes(spec, precision), page_bytes(spec, precision.kv)
    most, least = GPU.tokens_of_a_step(slots), max(LEAST_TOKENS, slots - 1 + grid)
    tokens = tokens_of_a_step(most, least, workspace, budget - weights)
    sizes = RunnerSizes(slots, context, max_tokens=tokens, gpu_memory=settings.gpu_memory)
    left = budget - weights - workspace(tokens)
    states = plan_states(sizes, page=page, room=left, bytes_of=partial(States.bytes, spec))
    plan = plan_memory(
        replace(sizes, slots=states.slots), weights=weights, page=page, free=card.free,
        workspace=workspace(tokens, states.slots), states=states,
    )  # fmt: skip
    room = room_of(
        spec, GpuSpeed(card.peaks, card.multiprocessors), WeightsAndCache(weights, page, precision.weights),
        pages=plan.kv_pages, slots=states.slots, context=context,
    )  # fmt: skip
    return Fit(
        weights=plan.weights,
        weights_in=precision.weights.value,
        workspace=plan.workspace,
        states=states.bytes,
        cache_tokens=plan.kv_pages * PAGE,
        sequences=room.sequences,
        rate=room.rate,
    )
