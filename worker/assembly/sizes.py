"""Sizes of a model's work by the settings: sequences, tokens, formats, and the limits of a GPU's runner."""

from dataclasses import dataclass

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import SettingsError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import device_count
from nightmill.worker.runners.gpu.element_choice import choose_element
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
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


def interactive_slots(running: int) -> int:
    """Slots that only interactive jobs may have: a sixteenth of those that run, if there are two or more."""
    return max(1, running // INTERACTIVE_SHARE) if running > 1 else 0


def capacity(running: int) -> int:
    """Jobs that a worker claims at once: what runs, and enough to refill it while the next are claimed."""
    return running + max(4, running // 2)


def hang_seconds(settings: Settings) -> float:
    """Silence after which an engine counts as hung."""
    return defaults_of(settings).hang_seconds if settings.hang_seconds is None else settings.hang_seconds


def context_length(settings: Settings, spec: ModelSpec, defaults: DeviceDefaults | None = None) -> int:
    """Tokens that a sequence may have; raises SettingsError where the model cannot have so many.

    defaults  of another kind of device than the one that these settings generate on
    """
    if settings.context is None:
        return min(spec.context_length, (defaults or defaults_of(settings)).context)
    if settings.context > spec.context_length:
        raise SettingsError(
            f"--context {settings.context} is more than the {spec.context_length} tokens that the model "
            "was made for"
        )
    return settings.context


def runner_sizes(settings: Settings, spec: ModelSpec) -> RunnerSizes:
    """Sizes that a GPU's runner is asked for, also where there is no GPU; raises as `context_length` does."""
    slots, context = settings.max_sequences or GPU.sequences, context_length(settings, spec, GPU)
    tokens = GPU.tokens_of_a_step(slots)
    return RunnerSizes(
        slots,
        context,
        depth=GPU_DEPTH,
        max_tokens=tokens if spec.encoder is None else max(tokens, context),
        gpu_memory=settings.gpu_memory,
    )


def precision_of(settings: Settings, file: GgufFile, spec: ModelSpec) -> Precision:
    """The formats that a GPU computes and keeps a model in."""
    element = choose_element(file, spec, settings.dtype).element
    return Precision(element, WeightsFormat(settings.weights), KvFormat(settings.kv))
