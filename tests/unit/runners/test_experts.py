"""Mixtures of experts in NumPy: which are chosen, and that a token's result is its own alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Experts, Role, RouterScores
from nightmill.worker.runners.reference import ReferenceRunner, Rounding, ops
from nightmill.worker.runners.reference.experts import choose
from tests.support.ggufs import write_spec
from tests.support.specs import GEMMAS, MIXTURES

Array = npt.NDArray[Any]
BESIDE = "keys as values, experts beside"
SPECS = MIXTURES | {BESIDE: GEMMAS[BESIDE]}
PLAIN = Experts(count=7, used=3, width=40, normalise=True)
MANY = 2048


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def network(tmp_path: Path) -> Callable[..., Callable[[Array], Array]]:
    """The experts of a spec's last layer as a function of tokens (T, width)."""

    def make(name: str, *, fp8: bool = False) -> Callable[[Array], Array]:
        spec = SPECS[name]
        file = GgufFile.open(write_spec(tmp_path / "model.gguf", spec))
        model = ReferenceRunner(file, spec, kv_pages=1, slots=1, rounding=Rounding(fp8=fp8))._model
        index = len(spec.layers) - 1
        return lambda x: model._feed_forward(
            index, spec.layers[index].feed_forward, model._layers[index], x, x
        )

    return make


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_a_token_alone_has_the_bits_that_it_has_among_many(
    name: str, fp8: bool, network: Callable[..., Callable[[Array], Array]]
) -> None:
    compute, x = network(name, fp8=fp8), normal(1, MANY, 64)
    together = compute(x)
    order = np.random.default_rng(2).permutation(MANY)
    assert (compute(x[order]) == together[order]).all()
    for row in (0, 1, 777, MANY - 1):
        assert (compute(x[row : row + 1])[0] == together[row]).all()
    assert (compute(x[:300]) == together[:300]).all()
    same = np.repeat(x[:1], MANY, axis=0)  # all to the same experts, none to the others
    assert (compute(same) == together[0]).all()


@pytest.mark.parametrize("name", SPECS)
def test_what_is_not_a_number_stays_in_its_row(
    name: str, network: Callable[..., Callable[[Array], Array]]
) -> None:
    compute, x = network(name), normal(1, 40, 64)
    clean = compute(x)
    x[7, 3], x[20] = np.nan, np.inf
    with np.errstate(invalid="ignore", over="ignore"):
        poisoned = compute(x)
    assert np.isnan(poisoned[[7, 20]]).all(axis=1).all()
    others = np.delete(np.arange(40), [7, 20])
    assert (poisoned[others] == clean[others]).all()


def test_of_equal_scores_the_lower_index_is_chosen_first() -> None:
    logits = np.zeros((3, 7), dtype=np.float32)
    logits[1, [2, 5]], logits[2, 6] = 1.0, -1.0
    for scores in RouterScores:
        chosen, weights = choose(replace(PLAIN, scores=scores), logits)
        assert chosen.tolist() == [[0, 1, 2], [2, 5, 0], [0, 1, 2]]
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
        assert (weights[0] == weights[0, 0]).all()


def test_a_selection_bias_chooses_but_does_not_weigh() -> None:
    logits = np.array([[3, 2, 1, 0, -1, -2, -3]], dtype=np.float32)
    bias = np.array([0, 0, 0, 0, 0, 0, 5], dtype=np.float32)
    experts = replace(PLAIN, scores=RouterScores.SIGMOID, selection_bias=True, normalise=False, scale=2.0)
    chosen, weights = choose(experts, logits, bias)
    assert chosen.tolist() == [[6, 0, 1]]
    np.testing.assert_allclose(weights[0], 2 / (1 + np.exp(-logits[0, [6, 0, 1]])), rtol=1e-6)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [(RouterScores.SIGMOID, [2, 3]), (RouterScores.SOFTMAX, [0, 1])],
)
def test_groups_are_as_good_as_their_best_experts(scores: RouterScores, expected: list[int]) -> None:
    """The first group has the one best expert, the second the two best in sum."""
    experts = Experts(count=6, used=2, width=8, scores=scores, groups=3, groups_used=1)
    chosen, _ = choose(experts, np.array([[2.0, -9, 1.5, 1.4, 0, 0]], dtype=np.float32))
    assert sorted(chosen[0].tolist()) == expected


def test_an_expert_that_nobody_is_sent_to_is_not_computed(tmp_path: Path) -> None:
    spec = MIXTURES["experts and a shared one"]
    file = GgufFile.open(write_spec(tmp_path / "model.gguf", spec))
    model = ReferenceRunner(file, spec, kv_pages=1, slots=1)._model
    weights, experts, x = model._layers[1], spec.layers[1].feed_forward, normal(1, 1, 64)
    alone = model._feed_forward(1, experts, weights, x, x)
    assert isinstance(experts, Experts)
    chosen, _ = choose(experts, ops.linear(x, weights[Role.ROUTER]))
    others = np.setdiff1d(np.arange(experts.count), chosen)
    weights[Role.EXPERTS_DOWN][others] = np.nan
    assert (model._feed_forward(1, experts, weights, x, x) == alone).all()
    weights[Role.EXPERTS_DOWN][chosen[0, 0]] = np.nan
    assert np.isnan(model._feed_forward(1, experts, weights, x, x)).all()


def test_experts_are_chosen_in_float_where_the_rest_is_fp8(tmp_path: Path) -> None:
    spec = MIXTURES["experts and a shared one"]
    file = GgufFile.open(write_spec(tmp_path / "model.gguf", spec))
    routers = []
    for fp8 in (False, True):
        runner = ReferenceRunner(file, spec, kv_pages=1, slots=1, rounding=Rounding(fp8=fp8))
        routers.append(runner._model._layers[0])
    float_, rounded = routers
    differs = {role.value for role in float_ if not np.array_equal(float_[role], rounded[role])}
    assert "router" not in differs
    assert {"experts_gate_up", "experts_down", "shared_gate_up"} <= differs


class SmallAndLarge:
    """A BLAS that adds in another order where a product has more than a million multiplications."""

    def __init__(self) -> None:
        self.matmul = np.matmul

    def __call__(self, x: Array, weight: Array) -> Array:
        if x.ndim == 2 and x.shape[0] * weight.size > 1_000_000:
            result: Array = self.matmul(x[:, ::-1].copy(), weight[::-1].copy())
            return result
        return self.matmul(x, weight)


@pytest.mark.parametrize("shape", [(64, 7), (48, 40), (64, 40), (64, 64), (96, 60), (200, 30), (300, 300)])
def test_kernels_that_change_with_the_size_are_noticed_for_small_weights_too(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of 64 x 7 is multiplied with 2,233 rows before OpenBLAS takes its other kernel."""
    weight, x = normal(1, *shape), normal(2, 4096, shape[0])
    monkeypatch.setattr(ops.np, "matmul", SmallAndLarge())
    assert not (ops.linear(x[:8], weight, tiled=False) == ops.linear(x, weight, tiled=False)[:8]).all()
    assert not ops.rows_are_independent(weight)
