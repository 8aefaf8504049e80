"""The limit that figures of benchmarks are held against, by hand."""

import pytest

from tests.support.limits import Limit
from tests.support.specs import dense_spec

QWEN = dense_spec(name="Qwen2.5-0.5B", layers=24, vocab=151_936)


# By hand: 494 million weights, so 988 MB a step and 0.988 GFLOP a token; 12,288 bytes of keys and values a
# token. At 512 tokens attention takes 1.473 us a sequence; products take 231 us, or 1.3 us each of over 178.
@pytest.mark.parametrize(
    ("sequences", "context", "expected"),
    [(1, 512, 4_300), (32, 512, 115_000), (256, 512, 360_000), (1024, 512, 360_000), (256, 640, 318_000)],
)
def test_limit_is_what_bytes_and_flops_allow(sequences: int, context: int, expected: int) -> None:
    assert Limit(QWEN).decoding(sequences, context) == pytest.approx(expected, rel=0.01)


# By hand: 358 million weights in layers and 136 million in the head.
def test_limit_of_a_workload_is_that_of_its_prompts_and_of_its_steps() -> None:
    limit = Limit(QWEN)
    steps = sum(256 / limit.decoding(256, 512 + step) for step in range(1, 256))
    prompts = (256 * 512 * 2 * 358e6 + 256 * 2 * 136e6 + 24 * 4 * 896 * 256 * 512 * 513 / 2) / 760e12
    assert limit.workload([512] * 256, [256] * 256, slots=256) == pytest.approx(prompts + steps, rel=0.002)
    alone = limit.workload([512] * 256, [256] * 256, slots=1)
    assert alone == pytest.approx(prompts + 256 * 255 / limit.decoding(1, 640), rel=0.002)
    assert limit.workload([1024] * 8, [1] * 8, slots=8) < limit.workload([1024] * 8, [2] * 8, slots=8)
