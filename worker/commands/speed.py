"""About how fast a worker generates with a model, by the bytes and the FLOPs of its steps, and by its host.

A forecast before anything runs; `nightmill plan` measures. On an H200, where the shares below come from, it
is within 21% of what a 0.5B and a 7B did in F16, with 1 to 1,024 sequences of 512 + 256 tokens. Other GPUs
are taken to reach the same shares of their peaks, other hosts to be as fast. Steps of a model of some
million parameters are over before the host has the next, and rows before it has taken in others.
"""

import math

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.peaks import Peaks

__all__ = ["expected_rate"]

_BYTES_SHARE, _FLOPS_SHARE = 0.75, 0.55  # of the peaks, in whole steps
_LAYER_SECONDS, _STEP_SECONDS = 10e-6, 40e-6  # for the way from kernel to kernel, and for what is in no layer
_HOST_STEP_SECONDS, _HOST_TOKEN_SECONDS = 100e-6, 0.6e-6  # of the engine's thread, beside the GPU
_ROW_SECONDS = 1 / 2165  # of the worker's process, from a row in SQL to its result


def expected_rate(
    spec: ModelSpec, peaks: Peaks, *, weights: int, token: float, fp8: bool, sequences: int, prompt: int,
    answer: int,
) -> float:  # fmt: skip
    """Output tokens per second of so many sequences at once, the time of their prompts included.

    weights         bytes that they take
    token           bytes of the keys and values of a token
    fp8             whether layers multiply in FP8, at twice the rate
    prompt, answer  tokens of each sequence

    A step takes as long as its products, for which the weights are read once, and its attention, which reads
    the keys and values of all contexts; or as the host takes to prepare it.
    """
    table = spec.vocab * spec.width
    parameters = sum(math.prod(weight.shape) for _, weight in spec.all_weights())
    multiplied = parameters if spec.tied_head else parameters - table  # of a table of its own, a row is read
    reading = weights * multiplied / parameters / (peaks.bytes * _BYTES_SHARE)
    flops = peaks.flops * _FLOPS_SHARE
    layers = 2 * (multiplied - table) / (2 * flops if fp8 else flops)  # seconds a token
    products = max(reading, (layers + 2 * table / flops) * sequences)
    attention = sequences * (prompt + answer / 2) * token / (peaks.bytes * _BYTES_SHARE)
    step = products + attention + _LAYER_SECONDS * len(spec.layers) + _STEP_SECONDS
    host = _HOST_STEP_SECONDS + _HOST_TOKEN_SECONDS * sequences
    whole = max(reading, sequences * prompt * layers) + answer * max(step, host)
    return sequences * answer / max(whole, sequences * _ROW_SECONDS)
