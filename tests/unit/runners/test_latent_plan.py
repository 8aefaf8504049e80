"""Models with latent attention in the memory plan: one row a token; and those that no kernel takes."""

from dataclasses import replace

import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.planning import RunnerPlanner
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.gpu.weights.layout import weight_bytes
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.parts import PARTS, latent_of
from tests.support.specs import dense_spec


def flash(layers: int = 47) -> ModelSpec:
    """GLM-4.7-Flash's attention, with dense feed-forward networks."""
    spec = dense_spec(width=2048, ffn_width=1536, vocab=154_880, bias=False)
    layer = replace(spec.layers[0], mixer=latent_of(20))
    return replace(spec, layers=(layer,) * layers)


def test_a_token_takes_one_row_of_576_numbers_a_layer() -> None:
    spec = flash()
    assert page_bytes(spec) == PAGE * (47 * 576 * 2 + 4)
    assert page_bytes(spec) / PAGE / 1024 == pytest.approx(52.9, abs=0.1)


def test_matrices_of_heads_are_elements_whatever_the_others_are() -> None:
    spec = flash(1)
    heads = 20 * 512 * (192 + 256)
    names = [name for _, weight in spec.all_weights() for name in weight.names]
    packed = replace(spec, tensor_types=dict.fromkeys(names, "Q8_0"))
    others = sum(weight.shape[0] * weight.shape[1] for _, weight in spec.all_weights() if weight.is_matrix)
    half, in_file = (
        weight_bytes(packed, precision) for precision in (HALF, Precision(weights=WeightsFormat.FILE))
    )
    assert half == pytest.approx(2 * (others + heads), rel=1e-3)
    assert in_file == pytest.approx(34 / 32 * others + 2 * heads, rel=2e-3)
    rounded = weight_bytes(packed, Precision(weights=WeightsFormat.FP8))
    table = spec.weights()[Role.EMBEDDING].shape
    assert rounded == pytest.approx(others + table[0] * table[1] + 2 * heads, rel=2e-3)


def test_the_plan_shares_out_what_a_gpu_has() -> None:
    spec = flash()
    planner = RunnerPlanner(spec, HALF, 132, lambda slots: slots)
    plan = planner.plan(RunnerSizes(slots=256, context=8192), 80 << 30)
    memory = plan.memory
    assert memory.weights + memory.workspace + memory.cache <= 0.9 * (80 << 30)
    assert memory.kv_pages == pytest.approx((0.9 * (80 << 30) - memory.weights) / page_bytes(spec), rel=0.05)
    absorbed, mixed, queries = 20 * 576, 20 * 512, 20 * 256
    latents = 2 * 8192 * (absorbed + mixed + queries)
    assert Activations.workspace(spec, max_tokens=8192, max_draws=256) > latents


@pytest.mark.parametrize("name", PARTS)
def test_what_kernels_compute_is_taken(name: str) -> None:
    check_spec(PARTS[name])


def with_latents(**changes: object) -> ModelSpec:
    spec = flash(2)
    other = replace(spec.layers[0], mixer=replace(latent_of(20), **changes))  # type: ignore[arg-type]
    return replace(spec, layers=(other, other))


REFUSED = {
    "latent attention of sizes 190": with_latents(key_dim=190),
    "latent attention of 129 heads": with_latents(heads=129),
    "layers of latent attention beside": replace(
        flash(2), layers=(flash(1).layers[0], dense_spec(width=2048, ffn_width=1536).layers[0])
    ),
    "latents of different heads": replace(
        flash(2), layers=(flash(1).layers[0], with_latents(heads=16).layers[0])
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_others_are_refused_with_what_it_is(said: str) -> None:
    with pytest.raises(RunnerError, match=f"do not take {said}"):
        check_spec(REFUSED[said])


def test_latents_are_not_kept_in_fp8() -> None:
    with pytest.raises(RunnerError, match="latents in elements: leave out `--kv fp8`"):
        check_spec(flash(1), Precision(kv=KvFormat.FP8))
