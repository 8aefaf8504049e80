"""The rate at which a worker is expected to generate with a model.

The speed is by the bytes and the FLOPs of its steps, and by its host: a forecast before anything runs;
`nightmill plan` measures. On an H200, where the shares below come from, it is within 21% of what a 0.5B did
in F16 and FP8, and a 7B in these, Q4_K_M and Q8_0, with 1 to 1,024 sequences. Other GPUs are taken to reach
the same shares of their peaks, other hosts to be as fast. Steps of a model of some million parameters are
over before the host has the next, and rows before it has taken in others.
"""

import math
from dataclasses import dataclass

from nightmill.worker.model.spec import Attention, ModelSpec, Role
from nightmill.worker.runners.gpu.device.peaks import Peaks
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.precision import WeightsFormat
from nightmill.worker.runners.gpu.products.formats import rounded_format

__all__ = ["EqualSequences", "GpuSpeed", "StepCost", "WeightsAndCache", "expected_rate", "step_cost"]

_BYTES_SHARE, _FLOPS_SHARE = 0.75, 0.55  # of the peaks, in whole steps
_PACKED_A_SECOND = 22e9  # weights that a multiprocessor turns into elements: Q4_K and Q8_0, 1 to 64 rows
_PACKED_BYTES = 1.5  # a weight, over which most are elements in the file, too
_PACKED_FLOPS_SHARE = 0.8  # of the rate without: 256 rows
_LAYER_SECONDS, _STEP_SECONDS = 10e-6, 40e-6  # for the way from kernel to kernel, and for what is in no layer
_HOST_TOKEN_SECONDS = 0.6e-6  # of the engine's thread, beside the GPU: 0.62 ms for 1,024 sequences, 2 cores
_HOST_STEP_SECONDS = 100e-6  # and for a step, an estimate
_ROW_SECONDS = 1 / 2165  # of the worker's process, from a row in SQL to its result: 8 tokens each, 16 cores


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """The speed of a GPU: its peaks of reading and multiplying, and its multiprocessors."""

    peaks: Peaks
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class WeightsAndCache:
    """The bytes of all weights and of a page of the KV cache, and the format of the weights."""

    weights: int
    page: int
    format: WeightsFormat


@dataclass(frozen=True, slots=True)
class EqualSequences:
    """Equal sequences that run at once; prompt and answer are the tokens of each."""

    sequences: int
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """The bytes, FLOPs and seconds of a step in which each sequence draws a token.

    weights, cache  bytes of weights, and of keys, values and states
    flops           of products with weights
    reading         seconds that reading weights takes, or making elements of packed ones ...
    computing       ... and multiplying: a step takes the longer of the two
    attending       seconds for keys, values and states
    between         seconds from kernel to kernel
    host            seconds in which the host prepares a step, beside the GPU
    """

    weights: float
    cache: float
    flops: float
    reading: float
    computing: float
    attending: float
    between: float
    host: float

    @property
    def seconds(self) -> float:
        """Seconds until the next step begins."""
        return max(max(self.reading, self.computing) + self.attending + self.between, self.host)

    @property
    def bound(self) -> str:
        """The part that takes most of it, in words."""
        parts = {
            "reading weights": self.reading, "multiplying": self.computing,
            "reading keys, values and states": self.attending, "the way from kernel to kernel": self.between,
        }  # fmt: skip
        return "the host" if self.seconds == self.host else max(parts, key=lambda part: parts[part])


def step_cost(
    spec: ModelSpec, gpu: GpuSpeed, size: WeightsAndCache, sequences: int, context: float
) -> StepCost:
    """Count a step of sequences that have so many tokens on average.

    The weights are read once (a token is multiplied with the active ones alone, all are read, as many
    sequences take all experts); attention reads the keys and values of all contexts, and states.
    """
    peaks, products = gpu.peaks, _products(spec, gpu, size)
    read = products.multiplied - round(_idle(spec, sequences))
    weights = size.weights * read / spec.parameters
    reading = weights / (peaks.bytes * _BYTES_SHARE)
    computing = (products.layers + products.head) * sequences
    if products.packed:
        reading = max(reading, read / (_PACKED_A_SECOND * gpu.multiprocessors))
        computing /= _PACKED_FLOPS_SHARE
    keys = context * (size.page / PAGE) * _seen_share(spec, context)
    cache = sequences * (keys + 2 * spec.state_bytes)  # states are read and written
    rounded = rounded_format(size.format)
    layer = _LAYER_SECONDS + (0.0 if rounded is None else rounded.layer_seconds)
    return StepCost(
        weights=weights, cache=cache, flops=2.0 * products.active * sequences, reading=reading,
        computing=computing, attending=cache / (peaks.bytes * _BYTES_SHARE),
        between=layer * len(spec.layers) + _STEP_SECONDS,
        host=_HOST_STEP_SECONDS + _HOST_TOKEN_SECONDS * sequences,
    )  # fmt: skip


def expected_rate(spec: ModelSpec, gpu: GpuSpeed, size: WeightsAndCache, load: EqualSequences) -> float:
    """Output tokens per second of this load, the time of its prompts included (`step_cost`)."""
    sequences, answer = load.sequences, load.answer
    step = step_cost(spec, gpu, size, sequences, load.prompt + answer / 2)
    prompts = max(step.reading, sequences * load.prompt * _products(spec, gpu, size).layers)
    return sequences * answer / max(prompts + answer * step.seconds, sequences * _ROW_SECONDS)


@dataclass(frozen=True, slots=True)
class _Products:
    """Products with weights: parameters of all and of a token's, seconds a token of layers and of the head.

    packed  weights are multiplied as they are in the file
    """

    multiplied: int
    active: int
    layers: float
    head: float
    packed: bool


def _products(spec: ModelSpec, gpu: GpuSpeed, size: WeightsAndCache) -> _Products:
    table, parameters = spec.vocab * spec.width, spec.parameters
    multiplied = parameters if spec.tied_head else parameters - table  # of a table of its own, a row is read
    rows = spec.weights().get(Role.LAYER_EMBEDDING)
    looked_up = 0 if rows is None else math.prod(rows.shape)
    multiplied -= looked_up
    active = multiplied - (parameters - spec.active_parameters - looked_up)
    flops, rounded = gpu.peaks.flops * _FLOPS_SHARE, rounded_format(size.format)
    gain = 1.0 if rounded is None else rounded.speedup(spec.width)
    packed = size.format is WeightsFormat.FILE and size.weights < _PACKED_BYTES * parameters
    return _Products(multiplied, active, 2 * (active - table) / (gain * flops), 2 * table / flops, packed)


def _seen_share(spec: ModelSpec, context: float) -> float:
    """Keys and values that layers read, over those that a context of so many tokens keeps without windows.

    Layers with a window read less of them, and layers that read the keys of others keep none.
    """
    kept = read = 0.0
    for layer in spec.layers:
        if isinstance(one := layer.mixer, Attention):
            hides = one.window is not None and one.window < context
            kept += one.kv_heads * one.head_dim * (one.keys_of is None)
            read += one.kv_heads * one.head_dim * (one.window / context if one.window and hides else 1.0)
    return read / kept if kept else 1.0


def _idle(spec: ModelSpec, sequences: int) -> float:
    """Parameters of experts that none of so many tokens goes to."""
    shares = {1 - experts.used / experts.count for experts in spec.experts}
    if not shares:
        return 0.0
    idle = max(shares)  # of a model's layers, all have the same
    return (spec.parameters - spec.active_parameters) * idle ** (sequences - 1)
