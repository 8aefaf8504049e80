"""The rate at which a worker is expected to generate with a model.

The speed is by the bytes and the FLOPs of its steps, and by its host: a forecast before anything runs;
`nightmill plan` measures. On an H200, where the shares below come from, it is within 21% of what a 0.5B did
in F16 and FP8, and a 7B in these, Q4_K_M and Q8_0, with 1 to 1,024 sequences. Other GPUs are taken to reach
the same shares of their peaks, other hosts to be as fast. Steps of a model of some million parameters are
over before the host has the next, and rows before it has taken in others.
"""

import math
from dataclasses import dataclass

from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.runners.gpu.device.peaks import Peaks
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.precision import WeightsFormat
from nightmill.worker.runners.gpu.products.formats import rounded_format

__all__ = ["EqualSequences", "GpuSpeed", "WeightsAndCache", "expected_rate"]

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


def expected_rate(spec: ModelSpec, gpu: GpuSpeed, size: WeightsAndCache, load: EqualSequences) -> float:
    """Output tokens per second of this load, the time of its prompts included.

    A step takes as long as its products, for which the weights are read once (a token is multiplied with the
    active ones alone, all are read, as many sequences take all experts), and its attention, which reads
    the keys and values of all contexts, and of states; or as the host takes to prepare it.
    """
    weights, peaks, sequences, answer = size.weights, gpu.peaks, load.sequences, load.answer
    table = spec.vocab * spec.width
    parameters = spec.parameters
    multiplied = parameters if spec.tied_head else parameters - table  # of a table of its own, a row is read
    rows = spec.weights().get(Role.LAYER_EMBEDDING)
    looked_up = 0 if rows is None else math.prod(rows.shape)
    multiplied -= looked_up
    active = multiplied - (parameters - spec.active_parameters - looked_up)
    multiplied -= round(_idle(spec, sequences))
    reading = weights * multiplied / parameters / (peaks.bytes * _BYTES_SHARE)
    flops = peaks.flops * _FLOPS_SHARE
    rounded = rounded_format(size.format)
    gain = 1.0 if rounded is None else rounded.speedup(spec.width)
    layers = 2 * (active - table) / (gain * flops)  # seconds a token
    computing = (layers + 2 * table / flops) * sequences
    if size.format is WeightsFormat.FILE and weights < _PACKED_BYTES * parameters:
        reading = max(reading, multiplied / (_PACKED_A_SECOND * gpu.multiprocessors))
        computing /= _PACKED_FLOPS_SHARE
    products = max(reading, computing)
    attention = sequences * (load.prompt + answer / 2) * (size.page / PAGE) / (peaks.bytes * _BYTES_SHARE)
    states = 2 * sequences * spec.state_bytes / (peaks.bytes * _BYTES_SHARE)  # read and written
    layer = _LAYER_SECONDS + (0.0 if rounded is None else rounded.layer_seconds)
    step = products + attention + states + layer * len(spec.layers) + _STEP_SECONDS
    host = _HOST_STEP_SECONDS + _HOST_TOKEN_SECONDS * sequences
    whole = max(reading, sequences * load.prompt * layers) + answer * max(step, host)
    return sequences * answer / max(whole, sequences * _ROW_SECONDS)


def _idle(spec: ModelSpec, sequences: int) -> float:
    """Parameters of experts that none of so many tokens goes to."""
    shares = {1 - experts.used / experts.count for experts in spec.experts}
    if not shares:
        return 0.0
    idle = max(shares)  # of a model's layers, all have the same
    return (spec.parameters - spec.active_parameters) * idle ** (sequences - 1)
