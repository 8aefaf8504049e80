"""What the kernel tests share: configurations, paged caches full of poison, comparisons, float64 oracles."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.philox import token_words, uniform
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.sampling import SamplingRows, filter_rows, gumbel, penalise
from tests.support.elements import ROUNDED_ONCE, rounded
from tests.support.fp8_pages import kept_by
from tests.support.specs import dense_spec

Array = npt.NDArray[Any]
EXACT = ROUNDED_ONCE[Element.F16]
ATTENTION = 5e-5
"""NMSE allowed to attention, whose weights and results are rounded: that makes 6e-6 in bfloat16."""
NEAR_TIE = 1e-5  # between noisy scores, where either token is right


def nmse(actual: Array, expected: Array) -> float:
    """Squared error over squared size, in float64; NaN where either has one."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    assert actual.shape == expected.shape
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def assert_close(actual: Array, expected: Array, limit: float) -> None:
    """Raise AssertionError where the error is over the limit, overall or in any row, or where a NaN is."""
    assert np.isfinite(actual).all(), f"{np.count_nonzero(~np.isfinite(actual))} values are not finite"
    error = nmse(actual, expected)
    assert error <= limit, f"NMSE {error:.3g} > {limit:g}"
    flat = expected.reshape(len(expected), -1).astype(np.float64)
    rows = np.square(actual.reshape(len(actual), -1).astype(np.float64) - flat).sum(1)
    worst = rows / np.square(flat).sum(1).clip(1e-30)
    assert worst.max() <= 20 * limit, f"row {worst.argmax()}: NMSE {worst.max():.3g} > {20 * limit:g}"


@dataclass
class Paged:
    """Sequences in a paged cache; whatever is not theirs is NaN."""

    keys: list[Array]  # (L, G, D) each, numbers that are elements
    values: list[Array]
    k_cache: Array  # [pages, G, 16, D] of them
    v_cache: Array
    tables: Array  # (S, stride) int32
    sinks: Array | None = None  # (H,) of the layer, if it has any


def make_paged(
    rng: np.random.Generator, lengths: list[int], kv_heads: int, head_dim: int, stride: int = 0,
    element: Element = Element.F16, kv: KvFormat = KvFormat.ELEMENT,
) -> Paged:  # fmt: skip
    """Random keys and values for contexts of these lengths, on pages in random order.

    kv  FP8: numbers that such a cache can keep, of tokens that differ in size
    """
    counts = [-(-length // PAGE) for length in lengths]
    pages = rng.permutation(sum(counts) + 5).astype(np.int32)
    caches = [np.full((len(pages), kv_heads, PAGE, head_dim), np.nan, dtype=np.float32) for _ in range(2)]
    tables = np.full((len(lengths), max(stride, *counts, 1)), -1, dtype=np.int32)
    held: tuple[list[Array], list[Array]] = ([], [])
    first = 0
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = pages[first : first + count]
        first += count
        tables[sequence, :count] = own
        for cache, kept in zip(caches, held, strict=True):
            rows = rng.standard_normal((length, kv_heads, head_dim))
            if kv is KvFormat.FP8:
                rows = kept_by(rows * rng.choice([0.3, 1.0, 1.7], (length, kv_heads, 1)), element)
            rows = rounded(rows, element)
            kept.append(rows)
            places = np.arange(length)
            cache[own[places // PAGE], :, places % PAGE] = rows
    return Paged(*held, *caches, tables)


def poison_before(paged: Paged, sequence: int, key: int) -> None:
    """NaN for the sequence's keys before this one, in the cache alone."""
    places = np.arange(max(key, 0))
    for cache in (paged.k_cache, paged.v_cache):
        cache[paged.tables[sequence, places // PAGE], :, places % PAGE] = np.nan


def attention_of(shape: tuple[int, int, int], **changes: Any) -> Attention:
    """Of that many query and KV heads, of that size."""
    spec = dense_spec(heads=shape[0], kv_heads=shape[1], head_dim=shape[2])
    return replace(spec.layers[0].attention, **changes)


def attention_oracle(
    attention: Attention, qkv: Array, keys: Array, values: Array, visible: Array, sinks: Array | None = None
) -> Array:
    """`ops.attention` in float64: qkv (M, H + 2 G, D), keys and values (L, G, D), visible (M,)."""
    q = qkv[:, : attention.heads]
    how = ops.Scores(attention.scale, attention.softcap, attention.window, sinks, attention.causal, len(keys))
    length = -(-len(keys) // ops.KEY_TILE) * ops.KEY_TILE
    padded = [np.zeros((1, length, *keys.shape[1:])) for _ in range(2)]
    padded[0][0, : len(keys)] = keys
    padded[1][0, : len(values)] = values
    result = np.empty(q.shape)
    for first in range(0, len(q), 64):  # bounds the memory of scores
        part = slice(first, first + 64)
        result[part] = ops.attention(q[None, part].astype(np.float64), *padded, visible[None, part], how)[0]
    return result


def noisy_scores(logits: Array, rows: SamplingRows, row: int) -> Array:
    """What the definition takes the maximum of, for one row of logits (R, V): float32 (V,)."""
    penalised = penalise(logits, rows)[row : row + 1].copy()
    parameters = rows.parameters[row : row + 1]
    if parameters["temperature"] == 0:
        return penalised[0]
    penalised -= penalised.max()
    with np.errstate(over="ignore"):
        penalised /= parameters["temperature"]
    filter_rows(penalised, *(parameters[name] for name in ("top_k", "top_p", "min_p")))
    vocab = penalised.shape[1]
    blocks = np.arange(-(-vocab // 4), dtype=np.uint32)
    seeds = np.full(len(blocks), parameters["seed"])
    positions = np.full(len(blocks), rows.positions[row], dtype=np.uint32)
    words = token_words(seeds, positions, blocks)
    return penalised[0] + gumbel(uniform(words)).reshape(-1)[:vocab]


# query heads, KV heads, head size
SHAPES = [(14, 2, 64), (16, 8, 128), (4, 4, 64), (32, 2, 128), (12, 1, 64), (20, 1, 64)]
OTHER_SHAPES = [(4, 2, 80), (10, 1, 96), (2, 1, 112), (2, 1, 160), (4, 2, 192), (8, 4, 256), (10, 1, 256)]
SLOW_SHAPES = [(4, 2, 16), (3, 3, 40), (8, 2, 32), (2, 1, 144), (2, 1, 320)]
WIDE_SHAPES = [(16, 2, 512), (3, 1, 512), (40, 1, 512)]
LONG = 32_000  # tokens


def make_queries(
    rng: np.random.Generator, rows: int, attention: Attention, element: Element = Element.F16
) -> np.ndarray:
    """qkv (rows, H + 2 G, D): queries large enough for sharp softmax, the rest poison."""
    heads, head_dim = attention.heads, attention.head_dim
    qkv = np.full((rows, heads + 2 * attention.kv_heads, head_dim), np.nan, dtype=np.float32)
    qkv[:, :heads] = rounded(rng.standard_normal((rows, heads, head_dim)) * 2, element)
    return qkv
