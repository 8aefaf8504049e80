"""The operations of the transformer as plain functions: the oracles that every kernel is tested against.

Each works in the precision of its input: float32 in the runner, float64 where an oracle is wanted. T is the
number of tokens, D a head's size, H and G the numbers of query and KV heads; head h reads KV head
h // (H // G). Nothing here keeps state.

A row's result does not depend on the rows around it. BLAS breaks that: for another number of rows it may add
in another order. So matrices are multiplied in tiles of ROW_TILE rows, keys and values in tiles of KEY_TILE,
and tiles are summed in order; padding adds exact zeros. Tiles of 8 rows gave the same bits at every place in
the tile with OpenBLAS 0.3.31's kernels for Prescott, Nehalem, Sandybridge, Haswell, Zen, SkylakeX and
Cooperlake; 16 and 32 did not on Haswell and Zen. With AVX-512 any number of rows from 8 up gave these bits,
in half the time: `rows_are_independent` finds out where that holds.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IndexArray = npt.NDArray[np.integer[Any]]

ROW_TILE = 8
KEY_TILE = 128
_ANY_KERNEL = 1 << 21  # multiplications from which on a product goes through the kernel of large ones
_MAX_SCORES = 1 << 23  # elements of attention scores held at once


def embedding(table: FloatArray, tokens: IndexArray) -> FloatArray:
    """Rows of `table` (V, width) for tokens (T,)."""
    return table[tokens]


def rms_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""
    return unit_rms(x, eps) * weight


def unit_rms(x: FloatArray, eps: float) -> FloatArray:
    """`rms_norm` without weights."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: FloatArray = x / np.sqrt(mean_square + x.dtype.type(eps))
    return normed


def layer_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """`rms_norm` of x less its mean (Ba et al. 2016); a bias is the caller's."""
    return rms_norm(x - np.mean(x, axis=-1, keepdims=True), weight, eps)


def linear(
    x: FloatArray, weight: FloatArray, bias: FloatArray | None = None, *, tiled: bool = True
) -> FloatArray:
    """x (T, inputs) times weight (inputs, outputs), plus bias (outputs,).

    tiled: multiply ROW_TILE rows at a time; else all at once, padded to a multiple of ROW_TILE.
    """
    rows, inputs = x.shape
    tiles = -(-rows // ROW_TILE)
    if rows % ROW_TILE:
        padded = np.zeros((tiles * ROW_TILE, inputs), dtype=x.dtype)
        padded[:rows] = x
        x = padded
    if tiled:
        x = x.reshape(tiles, ROW_TILE, inputs)
    product: FloatArray = np.matmul(x, weight)
    result = product.reshape(tiles * ROW_TILE, -1)[:rows]
    if bias is not None:
        result += bias
    return result


def rows_are_independent(weight: FloatArray) -> bool:
    """Return whether multiplying many rows by `weight` (inputs, outputs) at once gives the bits of tiles.

    An experiment on this machine's BLAS. Small products may go through other kernels, up to some size
    (OpenBLAS: 10^6 multiplications): for small weights all row counts are tried up to 32 tiles, for large
    ones a few. False without a trial for weights so small that 32 tiles stay below that size.
    """
    tiles = range(2, 33) if weight.size < 1 << 20 else (2, 3, 8)
    if weight.size * ROW_TILE * max(tiles) < _ANY_KERNEL:
        return False
    rows = ROW_TILE * max(tiles)
    x = np.random.default_rng(0).standard_normal((rows, len(weight))).astype(weight.dtype)
    expected = linear(x, weight)
    return all(
        np.array_equal(linear(x[: count * ROW_TILE], weight, tiled=False), expected[: count * ROW_TILE])
        for count in tiles
    )


def rope_table(
    positions: IndexArray, frequencies: npt.NDArray[np.float64], magnitude: float, dtype: npt.DTypeLike
) -> tuple[FloatArray, FloatArray]:
    """Cosine and sine, (T, D / 2) each; the angles are computed in float64, as positions may be large."""
    angles = np.asarray(positions, dtype=np.float64)[:, None] * frequencies
    return (np.cos(angles) * magnitude).astype(dtype), (np.sin(angles) * magnitude).astype(dtype)


def rope(x: FloatArray, cosine: FloatArray, sine: FloatArray, *, interleaved: bool) -> FloatArray:
    """Rotate the first N elements of heads x (T, heads, D); cosine and sine are (T, N / 2) (Su et al. 2021).

    interleaved: pairs are (2i, 2i + 1), as in llama GGUF files; else (i, i + N / 2), as in qwen2 and qwen3.
    """
    half = cosine.shape[-1]
    size = 2 * half
    pairs = (slice(0, size, 2), slice(1, size, 2)) if interleaved else (slice(0, half), slice(half, size))
    first, second = x[..., pairs[0]], x[..., pairs[1]]
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    rotated = x.copy()
    rotated[..., pairs[0]] = first * cosine - second * sine
    rotated[..., pairs[1]] = second * cosine + first * sine
    return rotated


def silu(x: FloatArray) -> FloatArray:
    """x / (1 + exp(-x)) (Elfwing et al. 2017)."""
    with np.errstate(over="ignore"):  # exp(-x) = inf makes silu 0, its limit
        result: FloatArray = x / (1 + np.exp(-x))
    return result


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(-x))"""
    with np.errstate(over="ignore"):  # exp(-x) = inf makes it 0, its limit
        result: FloatArray = 1 / (1 + np.exp(-x))
    return result


def relu_squared(x: FloatArray) -> FloatArray:
    """max(x, 0)^2 (So et al. 2021)."""
    result: FloatArray = np.square(np.maximum(x, 0))
    return result


def gelu(x: FloatArray) -> FloatArray:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    with np.errstate(over="ignore"):  # tanh(inf) is 1
        inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
        result: FloatArray = x.dtype.type(0.5) * x * (1 + np.tanh(inner))
    return result


def gelu_erf(x: FloatArray) -> FloatArray:
    """x / 2 (1 + erf(x / sqrt(2))); erf by Abramowitz and Stegun 7.1.26, within 1.5e-7."""
    kind = x.dtype.type
    z = np.abs(x) * kind(math.sqrt(0.5))
    t = 1 / (1 + kind(0.3275911) * z)
    series = np.full_like(x, 1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + kind(coefficient)
    erf = np.copysign(1 - series * t * np.exp(-z * z), x)
    result: FloatArray = kind(0.5) * x * (1 + erf)
    return result


def geglu_erf(gate_up: FloatArray) -> FloatArray:
    """gelu_erf(gate) * up of (T, 2 F), gate first."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return gelu_erf(gate) * up


def swiglu(gate_up: FloatArray) -> FloatArray:
    """silu(gate) * up of (T, 2 F), gate first (Shazeer 2020)."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return silu(gate) * up


def geglu(gate_up: FloatArray) -> FloatArray:
    """gelu(gate) * up of (T, 2 F), gate first (Shazeer 2020)."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return gelu(gate) * up


def reglu_squared(gate_up: FloatArray) -> FloatArray:
    """relu_squared(gate) * up of (T, 2 F), gate first."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return relu_squared(gate) * up


def clamped_swiglu(gate_up: FloatArray) -> FloatArray:
    """g sigmoid(1.702 g) (u + 1) of (T, 2 F), gate first: g no more than 7, u from -7 to 7 (gpt-oss)."""
    kind = gate_up.dtype.type
    gate, up = np.split(gate_up, 2, axis=-1)
    gate, up = np.minimum(gate, kind(7)), np.clip(up, kind(-7), kind(7))
    return gate * sigmoid(gate * kind(1.702)) * (up + 1)


def softcap(x: FloatArray, cap: float | None) -> FloatArray:
    """cap * tanh(x / cap): nothing gets beyond the cap. None: x."""
    if cap is None:
        return x
    result: FloatArray = np.tanh(x / x.dtype.type(cap)) * x.dtype.type(cap)
    return result


@dataclass(frozen=True, slots=True)
class Scores:
    """Scaling, capping and windowing of attention scores, as `worker.model.spec.Attention` says.

    sinks  (H,) scores that each head's softmax has beside, without values
    causal if not, each query sees the first `until` keys, of a window a half to each side
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    sinks: FloatArray | None = None
    causal: bool = True
    until: int = 0


def attention(
    q: FloatArray, keys: FloatArray, values: FloatArray, visible: IndexArray, how: Scores = Scores()
) -> FloatArray:
    """Softmax(q k / sqrt(D)) v for N groups of M queries, each group with its own keys.

    q (N, M, H, D); keys and values (N, L, G, D), L a multiple of KEY_TILE; visible (N, M): query m of group n
    sees the first visible[n, m] >= 1 keys, of those the last `how.window`. The keys past the last visible one
    must be finite; they have no influence. N may be 1 for keys and values, which are then shared. Returns
    (N, M, H, D).
    """
    groups, queries, heads, head_dim = q.shape
    length, kv_heads = keys.shape[1], keys.shape[2]
    shared, key_tiles = heads // kv_heads, length // KEY_TILE
    rows = queries * shared
    row_tiles = -(-rows // ROW_TILE)
    # The queries that share a KV head become rows of one product: (N, G, row tiles, 1, ROW_TILE, D).
    packed = np.zeros((groups, kv_heads, row_tiles * ROW_TILE, head_dim), dtype=q.dtype)
    packed[:, :, :rows] = (
        (q * q.dtype.type(head_dim**-0.5 if how.scale is None else how.scale))
        .reshape(groups, queries, kv_heads, shared, head_dim)
        .transpose(0, 2, 1, 3, 4)
        .reshape(groups, kv_heads, rows, head_dim)
    )
    packed = packed.reshape(groups, kv_heads, row_tiles, 1, ROW_TILE, head_dim)
    tiled = (keys.shape[0], key_tiles, KEY_TILE, kv_heads, head_dim)
    k = keys.reshape(tiled).transpose(0, 3, 1, 4, 2)[:, :, None]  # (N, G, 1, key tiles, D, KEY_TILE)
    v = values.reshape(tiled).transpose(0, 3, 1, 2, 4)[:, :, None]  # (N, G, 1, key tiles, KEY_TILE, D)

    scores = softcap(np.matmul(packed, k), how.softcap)  # (N, G, row tiles, key tiles, ROW_TILE, KEY_TILE)
    seen = np.ones((groups, row_tiles * ROW_TILE), dtype=visible.dtype)
    seen[:, :rows] = np.repeat(visible, shared, axis=1)
    seen = seen.reshape(groups, 1, row_tiles, 1, ROW_TILE, 1)
    places = np.arange(length).reshape(key_tiles, 1, KEY_TILE)
    hidden = places >= (seen if how.causal else how.until)
    if how.window is not None and not how.causal:
        hidden = hidden | (np.abs(places - (seen - 1)) > how.window // 2)
    elif how.window is not None:
        hidden |= places < seen - how.window
    np.copyto(scores, -np.inf, where=hidden)
    largest = scores.max(axis=(3, 5), keepdims=True)
    sinks = None
    if how.sinks is not None:
        sinks = np.zeros((kv_heads, row_tiles * ROW_TILE), dtype=q.dtype)
        sinks[:, :rows] = np.tile(how.sinks.reshape(kv_heads, shared), queries)
        sinks = sinks.reshape(kv_heads, row_tiles, 1, ROW_TILE, 1)
        largest = np.maximum(largest, sinks)
    scores -= largest
    np.exp(scores, out=scores)
    weights = scores.sum(axis=5)
    products = np.matmul(scores, v)  # (N, G, row tiles, key tiles, ROW_TILE, D)
    total, mixed = weights[:, :, :, 0], products[:, :, :, 0]
    for tile in range(1, key_tiles):  # in order: a hidden tile adds exact zeros
        total = total + weights[:, :, :, tile]
        mixed = mixed + products[:, :, :, tile]
    if sinks is not None:
        total = total + np.exp(sinks - largest)[:, :, :, 0, :, 0]
    mixed = (mixed / total[..., None]).reshape(groups, kv_heads, row_tiles * ROW_TILE, head_dim)[:, :, :rows]
    unpacked = mixed.reshape(groups, kv_heads, queries, shared, head_dim).transpose(0, 2, 1, 3, 4)
    result: FloatArray = unpacked.reshape(groups, queries, heads, head_dim)
    return result


def paged_attention(
    q: FloatArray, key_cache: FloatArray, value_cache: FloatArray, rows: IndexArray, positions: IndexArray,
    how: Scores = Scores(),
) -> FloatArray:  # fmt: skip
    """Causal attention of N groups of M tokens over the cache, bounded in memory.

    q (N, M, H, D); caches (cache rows, G, D); rows (N, L): the cache rows of each group's tokens in order,
    padded to a multiple of KEY_TILE with a row of zeros; positions (N, M). Returns (N, M, H, D).
    """
    groups, queries, heads = q.shape[:3]
    length = rows.shape[1]
    result = np.empty_like(q)
    at_once = max(1, _MAX_SCORES // (heads * length * -(-queries // ROW_TILE) * ROW_TILE))
    step = max(1, _MAX_SCORES // (heads * length)) // ROW_TILE * ROW_TILE or ROW_TILE
    for first in range(0, groups, at_once):
        part = slice(first, first + at_once)
        keys, values = (cache.take(rows[part], axis=0) for cache in (key_cache, value_cache))
        for begin in range(0, queries, step):
            chunk = (part, slice(begin, begin + step))
            result[chunk] = attention(q[chunk], keys, values, positions[chunk] + 1, how)
    return result
