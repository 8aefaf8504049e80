"""What models with experts take on cards of 16 and of 24 GB, by the plan of the runner."""

from dataclasses import replace

import pytest

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.experts.room import SLICE, ExpertRoom
from nightmill.worker.runners.gpu.kv_cache import kinds_layout
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.planning import RunnerPlanner
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.weights.choice import choose_weights
from nightmill.worker.runners.gpu.weights.layout import OF_EXPERTS, formats_in, weight_bytes
from tests.support.expert_shapes import EXPERT_SHAPES
from tests.support.quantised_models import kinds_of

GIB = 1 << 30
IN_FILE = Precision(weights=WeightsFormat.FILE)


def spec_of(name: str, type_name: str) -> ModelSpec:
    """A real model's, with the types of a file's tensors."""
    spec = EXPERT_SHAPES[name].file()[2]
    return replace(spec, tensor_types={one: kind.name for one, kind in kinds_of(spec, type_name).items()})


@pytest.mark.parametrize(
    ("name", "type_name", "free", "context"),
    [("gpt-oss-20b", "MXFP4", 16 * GIB, 4096), ("qwen3-30b-a3b", "Q4_K_M", 22 * GIB, 2048)],
)
def test_eight_sequences_have_room_for_whole_contexts(
    name: str, type_name: str, free: int, context: int
) -> None:
    spec = spec_of(name, type_name)
    planner = RunnerPlanner(spec, IN_FILE, 132, lambda slots: 2 * slots)
    plan = planner.plan(RunnerSizes(slots=8, context=context), free)
    layout = kinds_layout(spec)
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
    assert room > SLICE * 8 * (2048 * 4 + 768 * 2)
