"""What models with experts take on cards of 16 and of 24 GB, by the plan of the runner."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.experts.room import SLICE, ExpertRoom
from nightmill.worker.runners.gpu.kv_cache import kinds_layout
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.planning import RunnerPlanner
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.weights.choice import choose_weights
from nightmill.worker.runners.gpu.weights.layout import OF_EXPERTS, formats_in, weight_bytes
from tests.gpu.expert_trials import KINDS
from tests.support.expert_shapes import EXPERT_SHAPES
from tests.support.quantised_models import kinds_of
from tests.support.specs import mixture

GIB = 1 << 30
IN_FILE = Precision(weights=WeightsFormat.FILE)


def spec_of(name: str, type_name: str) -> ModelSpec:
    """A real model's, with the types of a file's tensors."""
    spec = EXPERT_SHAPES[name].file()[2]
    return replace(spec, tensor_types={one: kind.name for one, kind in kinds_of(spec, type_name).items()})


CARD_OF_24_GB = KNOWN_CARDS["rtx4090"].free


@pytest.mark.parametrize(
    ("name", "type_name", "free", "sizes"),
    [
        ("gpt-oss-20b", "MXFP4", 16 * GIB, RunnerSizes(slots=8, context=4096)),
        ("qwen3-30b-a3b", "Q4_K_M", CARD_OF_24_GB, RunnerSizes(slots=8, context=4096, gpu_memory=0.93)),
        ("qwen3-30b-a3b", "Q4_K_M", CARD_OF_24_GB, RunnerSizes(slots=8, context=3584)),
    ],
)
@pytest.mark.parametrize("hopper", [True, False])
def test_eight_sequences_have_room_for_whole_contexts(
    name: str, type_name: str, free: int, sizes: RunnerSizes, hopper: bool
) -> None:
    """For those of 3,584 tokens, steps on a card of 24 GB are smaller than they were: all fit so."""
    spec = spec_of(name, type_name)
    planner = RunnerPlanner(spec, IN_FILE, 132, lambda slots: 2 * slots, hopper=hopper)
    plan = planner.plan(sizes, free)
    layout, context = kinds_layout(spec), sizes.context
    assert plan.memory.kv_pages == 8 * (context // 16 if layout is None else layout.pages_for(context))


def test_experts_stay_as_they_are_in_the_file() -> None:
    """On any card, and no bytes of theirs are added but what fills up packets."""
    spec = spec_of("gpt-oss-20b", "MXFP4")
    assert formats_in(spec, IN_FILE, *OF_EXPERTS) == {Format.MXFP4}
    auto = Precision(weights=WeightsFormat.AUTO)
    for budget in (16 * GIB, 130 * GIB):
        assert choose_weights(spec, auto, budget)[0].weights is WeightsFormat.FILE
    experts = 24 * 32 * 3 * 2880 * 2880 * 17 // 32
    assert experts < weight_bytes(spec, IN_FILE) < experts * 1.2


def test_the_room_of_experts_is_bounded_by_a_slice() -> None:
    spec = spec_of("qwen3-30b-a3b", "Q4_K_M")
    room = ExpertRoom.workspace(spec, SLICE, fp8=False)
    assert room == ExpertRoom.workspace(spec, 8 * SLICE, fp8=False)
    assert room > ExpertRoom.workspace(spec, SLICE // 2, fp8=False)
    assert SLICE * 8 * (2048 * 4 + 768 * 2) < room < SLICE * 8 * (2048 * 4 + 768 * 2) * 1.03


@pytest.mark.parametrize("name", sorted(KINDS))
def test_buffers_of_experts_share_no_memory_but_what_is_done_with(name: str) -> None:
    """Ups are done with when outputs are written."""
    experts = KINDS[name]
    spec, at = replace(mixture(experts), width=72), ExpertRoom.at(1 << 20, experts, 72, 100, fp8=True)
    buffers = {field.name: getattr(at, field.name) for field in fields(ExpertRoom)}
    spans = sorted(
        (
            one.address,
            max(one.address + math.prod(one.shape) * one.dtype.itemsize, one.scales + 4 * one.shape[0]),
        )
        for name, one in buffers.items()
        if name != "ups" and math.prod(one.shape)
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    ups, outputs = at.ups, at.outputs
    assert ups.address == outputs.address
    after = min(start for start, _ in spans if start > outputs.address)
    assert ups.address + math.prod(ups.shape) * 4 <= after
    last = max(end for _, end in spans)
    assert last <= (1 << 20) + ExpertRoom.workspace(spec, 100, fp8=True) < last + 256
