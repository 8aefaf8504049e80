"""The limit that figures of benchmarks are held against, by hand."""

import pytest

from tests.support.expert_shapes import EXPERT_SHAPES
from tests.support.gemma4_shapes import GEMMA4_SHAPES
from tests.support.hybrid_shapes import HYBRID_SHAPES
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


# By hand: of 752 million weights, 1,504 MB in half, a step reads 352 us; states of 20.2 MB go there and back
# in 9.46 us, and 6 layers have 12,288 bytes of keys and values a token.
def test_states_are_read_and_written_for_each_drawn_token() -> None:
    spec = HYBRID_SHAPES["qwen3.5-0.8b"].file()[2]
    limit = Limit(spec)
    assert spec.state_bytes == 18 * (16 * 128 * 128 + 3 * 6144) * 4 == 20_201_472
    assert 1 / limit.decoding(1, 0) == pytest.approx(352e-6 + 9.46e-6, rel=0.01)
    assert 64 / limit.decoding(64, 512) == pytest.approx(
        352e-6 + 64 * (9.46e-6 + 512 * 12_288 / 4.27e12), rel=0.01
    )
    drawn = limit.workload([64], [101], 1) - limit.workload([64], [1], 1)
    assert drawn == pytest.approx(100 / limit.decoding(1, 114), rel=0.01)


# By hand: of 29.0 billion weights of experts a token goes through an eighth of a half; beside them are 1.81
# billion in layers and 311 million in the head. Of 128 experts 64 tokens go to 125.9.
def test_of_experts_a_step_reads_those_that_its_tokens_go_to() -> None:
    limit = Limit(EXPERT_SHAPES["qwen3-30b-a3b"].file()[2])
    experts, others = 48 * 128 * 3 * 2048 * 768, 48 * (2 * 4096 + 2 * 512) * 2048 + 151_936 * 2048
    routers = 48 * 2 * 128 * 2048  # two halves for each float
    for sequences, share in ((1, 8 / 128), (64, 125.9 / 128), (256, 1.0)):
        step = 2 * (others + routers + share * experts) / 4.27e12
        assert sequences / limit.decoding(sequences, 0) == pytest.approx(step, rel=0.001)
    assert 16_384 / limit.decoding(16_384, 0) == pytest.approx(
        16_384 * 2 * (others + routers / 2 + experts / 16) / 760e12, rel=0.001
    )


# By hand: 358 million weights in layers and 136 million in the head.
def test_limit_of_a_workload_is_that_of_its_prompts_and_of_its_steps() -> None:
    limit = Limit(QWEN)
    steps = sum(256 / limit.decoding(256, 512 + step) for step in range(1, 256))
    prompts = (256 * 512 * 2 * 358e6 + 256 * 2 * 136e6 + 24 * 4 * 896 * 256 * 512 * 513 / 2) / 760e12
    assert limit.workload([512] * 256, [256] * 256, slots=256) == pytest.approx(prompts + steps, rel=0.002)
    alone = limit.workload([512] * 256, [256] * 256, slots=1)
    assert alone == pytest.approx(prompts + 256 * 255 / limit.decoding(1, 640), rel=0.002)
    assert limit.workload([1024] * 8, [1] * 8, slots=8) < limit.workload([1024] * 8, [2] * 8, slots=8)


# By hand, 26B-A4B: 25 layers with 8 KV heads of 256 see 1,024 tokens, 5 with 2 of 512 see all.
def test_windows_bound_what_is_read() -> None:
    limit = Limit(GEMMA4_SHAPES["gemma4-26b-a4b"].spec)
    local, whole = 25 * 2 * 8 * 256 * 2, 5 * 2 * 2 * 512 * 2
    for context in (512, 1024, 8192):
        read = min(context, 1024) * local + context * whole
        took = 1 / limit.decoding(1, context) - 1 / limit.decoding(1, 0)
        assert took == pytest.approx(read / 4.27e12)
    drawn = limit.workload([1000], [201], 1) - limit.workload([1000], [1], 1)
    assert drawn == pytest.approx(sum(1 / limit.decoding(1, 1000 + more) for more in range(1, 201)))
    pairs = sum(min(seen, 1024) for seen in range(1, 5001))
    longer = limit.workload([5000], [1], 1) - 5000 * limit.workload([1], [1], 1)
    assert longer == pytest.approx(
        4 * (16 * 256 * 25 * (pairs - 5000) + 16 * 512 * 5 * (5000 * 5001 // 2 - 5000)) / 760e12
        - 4999 * 2 * 262_144 * 2816 / 760e12
    )


# By hand: the first 15 layers of E2B keep keys and values, the other 20 nothing.
def test_of_prompts_layers_that_keep_nothing_compute_what_is_drawn() -> None:
    spec = GEMMA4_SHAPES["gemma4-e2b"].spec
    limit = Limit(spec)
    network, inputs = 3 * 1536 * 6144, 2 * 1536 * 256
    local, whole = (1536 * size * (2 * 8 + 2) for size in (256, 512))
    before = 15 * (network + inputs) + 12 * local + 3 * whole + 1536 * 35 * 256
    behind = 20 * (2 * network + inputs) + 16 * 2 * 8 * 256 * 1536 + 4 * 2 * 8 * 512 * 1536
    pairs = 8 * 256 * (12 * (512 * 513 // 2 + 512 * 512) + 16 * 512)
    pairs += 8 * 512 * (3 * 1024 * 1025 // 2 + 4 * 1024)
    flops = 1024 * 2 * before + 2 * behind + 2 * 262_144 * 1536 + 4 * pairs
    assert limit.workload([1024], [1], 1) == pytest.approx(flops / 760e12)
    assert 1 / limit.decoding(1, 0) == pytest.approx(
        2 * (before + behind + 262_144 * 1536) / 4.27e12, rel=1e-3
    )
    read = 2 * (28 * 2 * 256 * 512 + 7 * 2 * 512 * 4096) / 4.27e12
    assert 1 / limit.decoding(1, 4096) - 1 / limit.decoding(1, 0) == pytest.approx(read)
