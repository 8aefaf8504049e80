"""Mixers with states against formulas in float64, token by token; and their two forms against each other."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.worker.runners.base import STATE_CHUNK
from nightmill.worker.runners.reference.recurrences import (
    causal_convolution,
    delta_chunked,
    delta_recurrent,
    mamba2_chunked,
    mamba2_recurrent,
)

Array = npt.NDArray[Any]
Inputs = tuple[Array, ...]
LENGTHS = st.one_of(st.integers(1, 3), st.sampled_from([63, 64, 65, 128, 130]), st.integers(1, 200))


def delta_by_formula(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """Yang et al. 2024, equation 10, written out for each head and token."""
    state, result = state.copy(), np.zeros_like(v)
    for head in range(v.shape[1]):
        for t in range(len(v)):
            key, b = k[t, head], beta[t, head]
            kept = np.exp(decay[t, head]) * (np.eye(len(key)) - b * np.outer(key, key))
            state[head] = kept @ state[head] + b * np.outer(key, v[t, head])
            result[t, head] = state[head].T @ q[t, head]
    return result, state


def mamba_by_formula(
    x: Array, b: Array, c: Array, step: Array, decay: Array, state: Array
) -> tuple[Array, Array]:
    """Dao and Gu 2024, equation 1 with a scalar A, written out for each head and token."""
    state, result = state.copy(), np.zeros_like(x)
    for head in range(x.shape[1]):
        group = head * b.shape[1] // x.shape[1]
        for t in range(len(x)):
            written = step[t, head] * np.outer(b[t, group], x[t, head])
            state[head] = np.exp(decay[t, head]) * state[head] + written
            result[t, head] = c[t, group] @ state[head]
    return result, state


def delta_inputs(rng: np.random.Generator, length: int, heads: int, sizes: tuple[int, int]) -> Inputs:
    keys, values = sizes
    q, k = (rng.standard_normal((length, heads, keys)) for _ in "qk")
    q, k = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (q, k))
    decay = -(rng.uniform(0.001, 1.5, (length, heads)) ** 3)  # most of them keep nearly all
    beta = rng.uniform(0.01, 0.99, (length, heads))
    state = rng.standard_normal((heads, keys, values))
    return q / keys**0.5, k, rng.standard_normal((length, heads, values)), decay, beta, state


def mamba_inputs(rng: np.random.Generator, length: int, heads: int, sizes: tuple[int, int]) -> Inputs:
    states, inner = sizes
    groups = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    x = rng.standard_normal((length, heads, inner))
    b, c = (rng.standard_normal((length, groups, states)) for _ in "bc")
    step = rng.uniform(0.001, 0.3, (length, heads))
    decay = -step * rng.uniform(0.5, 8.0, heads)
    return x, b, c, step, decay, rng.standard_normal((heads, states, inner))


KINDS: dict[str, tuple[Callable[..., Inputs], Callable[..., tuple[Array, Array]], Callable[..., Array], Any]]
KINDS = {
    "delta net": (delta_inputs, delta_by_formula, delta_chunked, delta_recurrent),
    "Mamba-2": (mamba_inputs, mamba_by_formula, mamba2_chunked, mamba2_recurrent),
}


def one_by_one(recurrent: Callable[..., Array], inputs: Inputs) -> tuple[Array, Array]:
    """The recurrent form over all tokens of a sequence."""
    state = inputs[-1][None].copy()
    steps = [recurrent(*(one[t : t + 1] for one in inputs[:-1]), state) for t in range(len(inputs[0]))]
    return np.concatenate(steps), state[0]


def in_pieces(chunked: Callable[..., Array], inputs: Inputs, ends: list[int]) -> tuple[Array, Array]:
    """The chunked form over pieces that end at these places."""
    state = inputs[-1].copy()
    pieces = [
        chunked(*(one[first:end] for one in inputs[:-1]), state)
        for first, end in zip([0, *ends], [*ends, len(inputs[0])], strict=True)
        if first < end
    ]
    return np.concatenate(pieces), state


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    length=LENGTHS,
    heads=st.integers(1, 6),
    sizes=st.tuples(st.sampled_from([1, 4, 16, 33]), st.sampled_from([1, 5, 16, 40])),
)
def test_both_forms_are_the_formula_in_float64(
    kind: str, seed: int, length: int, heads: int, sizes: tuple[int, int]
) -> None:
    make, formula, chunked, recurrent = KINDS[kind]
    inputs = make(np.random.default_rng(seed), length, heads, sizes)
    expected, end = formula(*inputs)
    for result, state in (one_by_one(recurrent, inputs), in_pieces(chunked, inputs, [])):
        assert result.dtype == state.dtype == np.float64
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-11 * np.abs(expected).max())
        np.testing.assert_allclose(state, end, rtol=0, atol=1e-11 * np.abs(end).max())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    length=LENGTHS,
    heads=st.integers(1, 6),
    sizes=st.tuples(st.sampled_from([16, 33, 128]), st.sampled_from([16, 40, 128])),
)
def test_in_float_they_differ_from_it_by_rounding_alone(
    kind: str, seed: int, length: int, heads: int, sizes: tuple[int, int]
) -> None:
    make, _, chunked, recurrent = KINDS[kind]
    wide = make(np.random.default_rng(seed), length, heads, sizes)
    inputs = tuple(one.astype(np.float32) for one in wide)
    expected, end = one_by_one(recurrent, tuple(one.astype(np.float64) for one in inputs))
    for result, state in (one_by_one(recurrent, inputs), in_pieces(chunked, inputs, [])):
        assert result.dtype == state.dtype == np.float32
        assert np.abs(result - expected).max() < 2e-5 * np.abs(expected).max()
        assert np.abs(state - end).max() < 2e-5 * np.abs(end).max()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 400), data=st.data())
def test_pieces_that_end_on_the_grid_have_the_bits_of_the_whole(
    kind: str, seed: int, length: int, data: st.DataObject
) -> None:
    """So do tokens before others that the whole has: a chunk's length changes none of its bits."""
    make, _, chunked, _ = KINDS[kind]
    inputs = tuple(one.astype(np.float32) for one in make(np.random.default_rng(seed), length, 4, (16, 24)))
    grid = range(STATE_CHUNK, length, STATE_CHUNK)
    ends = data.draw(st.lists(st.sampled_from(grid), unique=True) if grid else st.just([]))
    whole, end = in_pieces(chunked, inputs, [])
    pieces, state = in_pieces(chunked, inputs, sorted(ends))
    assert (pieces == whole).all() and (state == end).all()
    fewer = data.draw(st.integers(1, length))
    beginning, _ = in_pieces(chunked, (*(one[:fewer] for one in inputs[:-1]), inputs[-1]), [])
    assert (beginning == whole[:fewer]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrent_form_has_the_same_bits_in_any_company(kind: str) -> None:
    make, _, _, recurrent = KINDS[kind]
    rng = np.random.default_rng(3)
    inputs = [one.astype(np.float32) for one in make(rng, 40, 6, (128, 64))]
    states = rng.standard_normal((40, *inputs[-1].shape), dtype=np.float32)
    together = states.copy()
    result = recurrent(*inputs[:-1], together)
    for count in (1, 2, 7, 31):
        for first in range(0, 40 - count, 5):
            part, own = slice(first, first + count), states[first : first + count].copy()
            assert (recurrent(*(one[part] for one in inputs[:-1]), own) == result[part]).all()
            assert (own == together[part]).all()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(1, 20),
    channels=st.integers(1, 9),
    kernel=st.integers(1, 5),
    cut=st.integers(0, 20),
)
def test_a_causal_convolution_is_the_formula_and_goes_on_where_it_was_cut(
    seed: int, length: int, channels: int, kernel: int, cut: int
) -> None:
    rng = np.random.default_rng(seed)
    x, before = rng.standard_normal((length, channels)), rng.standard_normal((kernel - 1, channels))
    weight = rng.standard_normal((channels, kernel))
    everything = np.concatenate([before, x])
    expected = np.array([(everything[t : t + kernel] * weight.T).sum(axis=0) for t in range(length)])
    state = before.copy()
    parts = [causal_convolution(part, state, weight) for part in (x[:cut], x[cut:]) if len(part)]
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-12, atol=1e-12)
    assert (state == everything[length:]).all()
    assert (np.concatenate(parts) == causal_convolution(x, before.copy(), weight)).all()
