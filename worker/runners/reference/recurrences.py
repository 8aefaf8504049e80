"""Mixers with states as plain functions: the oracles that kernels of such layers are tested against.

Each has two forms of the same recurrence. The *recurrent* form takes a token of each of N sequences. The
*chunked* form takes the tokens of one sequence, CHUNK at a time: what tokens of a chunk do to each other is a
product of matrices, and only the state goes from one chunk to the next. In float they differ in their last
bits, so which of them computes a position is decided by the position alone (`worker.runners.base`). A last
chunk that is shorter is filled up with zeros, which change nothing: so products have the same shape, and a
token's bits do not depend on how many follow.

H is the number of heads with a state of their own, G that of heads whose keys or inputs they share. All work
in the precision of their input: float32 in the runner, float64 where an oracle is wanted. States are changed
in place.
"""

import numpy as np

from nightmill.worker.runners.base import STATE_CHUNK
from nightmill.worker.runners.reference.ops import FloatArray

__all__ = ["causal_convolution", "delta_chunked", "delta_recurrent", "mamba2_chunked", "mamba2_recurrent"]


def causal_convolution(x: FloatArray, before: FloatArray, weight: FloatArray) -> FloatArray:
    """Convolve each channel of x (..., T, C) by weight (C, K); `before` (..., K - 1, C) is what preceded.

    Afterwards `before` holds the last K - 1 inputs.
    """
    count = x.shape[-2]
    inputs = np.concatenate([before, x], axis=-2)
    result: FloatArray = inputs[..., :count, :] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        result = result + inputs[..., tap : tap + count, :] * weight[:, tap]
    before[...] = inputs[..., count:, :]
    return result


def delta_recurrent(
    q: FloatArray, k: FloatArray, v: FloatArray, decay: FloatArray, beta: FloatArray, state: FloatArray
) -> FloatArray:
    """A token of each of N sequences through the gated delta rule; returns (N, H, V).

    q, k (N, H, K); v (N, H, V); decay, the logarithm of what is kept, and beta (N, H); state (N, H, K, V).
    """
    state *= np.exp(decay)[..., None, None]
    change = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state += k[..., :, None] * change[..., None, :]
    result: FloatArray = (q[..., None, :] @ state)[..., 0, :]
    return result


def delta_chunked(
    q: FloatArray, k: FloatArray, v: FloatArray, decay: FloatArray, beta: FloatArray, state: FloatArray
) -> FloatArray:
    """T tokens of a sequence through the gated delta rule; returns (T, H, V).

    q, k (T, H, K); v (T, H, V); decay, beta (T, H); state (H, K, V). What the tokens of a chunk write is the
    solution U of (I + A) U = beta (V - exp(sums) K S), with A below its diagonal beta_t exp(sum_t - sum_s)
    k_t k_s (Yang et al. 2024, arXiv:2412.06464, section 3.3), found row by row.
    """
    result = np.empty_like(v)
    for first in range(0, len(q), STATE_CHUNK):
        part = slice(first, first + STATE_CHUNK)
        queries, keys, values = (_by_head(x[part]) for x in (q, k, v))
        sums, betas = np.cumsum(_by_head(decay[part]), axis=1), _by_head(beta[part])
        kept, between = np.exp(sums)[..., None], _between(sums)
        transposed = keys.transpose(0, 2, 1)
        earlier = np.tril(keys @ transposed * between, -1) * betas[..., None]
        written = (values - kept * (keys @ state)) * betas[..., None]
        for row in range(1, STATE_CHUNK):
            written[:, row] -= (earlier[:, row, None, :row] @ written[:, :row])[:, 0]
        mixed = kept * (queries @ state) + np.tril(queries @ transposed * between) @ written
        state *= kept[:, -1:]
        state += (transposed * between[:, -1, None, :]) @ written
        result[part] = mixed.transpose(1, 0, 2)[: len(result[part])]
    return result


def mamba2_recurrent(
    x: FloatArray, b: FloatArray, c: FloatArray, step: FloatArray, decay: FloatArray, state: FloatArray
) -> FloatArray:
    """A token of each of N sequences through Mamba-2, but for its skip; returns (N, H, D).

    x (N, H, D); b, c (N, G, S), of which head h has row h // (H / G); step, decay = A step (N, H); state
    (N, H, S, D).
    """
    shared = x.shape[1] // b.shape[1]
    b, c = (np.repeat(part, shared, axis=1) for part in (b, c))
    state *= np.exp(decay)[..., None, None]
    state += b[..., :, None] * (x * step[..., None])[..., None, :]
    result: FloatArray = (c[..., None, :] @ state)[..., 0, :]
    return result


def mamba2_chunked(
    x: FloatArray, b: FloatArray, c: FloatArray, step: FloatArray, decay: FloatArray, state: FloatArray
) -> FloatArray:
    """T tokens of a sequence through Mamba-2, but for its skip; returns (T, H, D).

    x (T, H, D); b, c (T, G, S); step, decay (T, H); state (H, S, D). Dao and Gu 2024, arXiv:2405.21060,
    section 6.
    """
    result = np.empty_like(x)
    shared = x.shape[1] // b.shape[1]
    for first in range(0, len(x), STATE_CHUNK):
        part = slice(first, first + STATE_CHUNK)
        inputs = _by_head(x[part]) * _by_head(step[part])[..., None]
        writing, reading = (np.repeat(_by_head(one[part]), shared, axis=0) for one in (b, c))
        sums = np.cumsum(_by_head(decay[part]), axis=1)
        kept, between = np.exp(sums)[..., None], _between(sums)
        transposed = writing.transpose(0, 2, 1)
        mixed = kept * (reading @ state) + np.tril(reading @ transposed * between) @ inputs
        state *= kept[:, -1:]
        state += (transposed * between[:, -1, None, :]) @ inputs
        result[part] = mixed.transpose(1, 0, 2)[: len(result[part])]
    return result


def _by_head(x: FloatArray) -> FloatArray:
    """(T, H, ...) as contiguous (H, STATE_CHUNK, ...), filled up with zeros."""
    filled = np.zeros((x.shape[1], STATE_CHUNK, *x.shape[2:]), dtype=x.dtype)
    filled[:, : len(x)] = np.moveaxis(x, 0, 1)
    return filled


def _between(sums: FloatArray) -> FloatArray:
    """Return the share of what token s wrote that is kept at token t: sums (H, T) -> (H, T, T).

    It is 1 for s = t, and 0 where s is later.
    """
    differences = sums[:, :, None] - sums[:, None, :]
    later = np.triu(np.ones(differences.shape[1:], dtype=np.bool_), 1)
    return np.asarray(np.exp(np.where(later, -np.inf, differences)), dtype=sums.dtype)
