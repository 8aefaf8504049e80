"""About how fast a GPU generates with a model, by the bytes and the FLOPs of its steps.

A forecast before anything runs; `nightmill plan` measures. On an H200, where the shares below come from, it
is within 21% of what a 0.5B and a 7B did in F16, with 1 to 1,024 sequences of 512 + 256 tokens. Other GPUs
are taken to reach the same shares of their peaks.
"""

import math

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.peaks import Peaks

__all__ = ["expected_rate"]

_BYTES_SHARE, _FLOPS_SHARE = 0.75, 0.55  # of the peaks, in whole steps
_LAYER_SECONDS = 10e-6  # of a step, for the way from kernel to kernel


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
    the keys and values of all contexts.
    """
    table = spec.vocab * spec.width
    parameters = sum(math.prod(weight.shape) for _, weight in spec.all_weights())
    multiplied = parameters if spec.tied_head else parameters - table  # of a table of its own, a row is read
    reading = weights * multiplied / parameters / (peaks.bytes * _BYTES_SHARE)
    flops = peaks.flops * _FLOPS_SHARE
    layers = 2 * (multiplied - table) / (2 * flops if fp8 else flops)  # seconds a token
    products = max(reading, (layers + 2 * table / flops) * sequences)
    attention = sequences * (prompt + answer / 2) * token / (peaks.bytes * _BYTES_SHARE)
    step = products + attention + _LAYER_SECONDS * len(spec.layers)
    return sequences * answer / (max(reading, sequences * prompt * layers) + answer * step)
