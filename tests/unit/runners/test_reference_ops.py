"""Each operation against its formula written out in float64 loops."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.runners.reference import ops

Array = npt.NDArray[np.float32]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33])
@pytest.mark.parametrize("tiled", [True, False])
def test_linear(rows: int, tiled: bool) -> None:
    x, weight, bias = normal(0, rows, 48), normal(1, 48, 20), normal(2, 20)
    expected = [
        [sum(float(x[r, i]) * float(weight[i, o]) for i in range(48)) + float(bias[o]) for o in range(20)]
        for r in range(rows)
    ]
    np.testing.assert_allclose(ops.linear(x, weight, bias, tiled=tiled), expected, rtol=1e-4, atol=1e-5)
    assert ops.linear(x.astype(np.float64), weight.astype(np.float64)).dtype == np.float64


def test_linear_leaves_its_input_alone_and_reads_no_padding() -> None:
    x = np.full((16, 8), np.nan, dtype=np.float32)
    x[:5] = 1
    assert ops.linear(x[:5], np.ones((8, 3), dtype=np.float32)).tolist() == [[8.0] * 3] * 5
    assert (x[:5] == 1).all()


@pytest.mark.parametrize("shape", [(24, 40), (96, 96), (256, 300)])
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(shape: tuple[int, int]) -> None:
    x, weight = normal(0, 50, shape[0]), normal(1, *shape)
    whole = ops.linear(x, weight)
    order = np.random.default_rng(2).permutation(50)
    assert (ops.linear(x[order], weight) == whole[order]).all()
    for row in (0, 7, 13, 49):
        assert (ops.linear(x[row : row + 1], weight)[0] == whole[row]).all()
    if ops.rows_are_independent(weight):
        assert (ops.linear(x, weight, tiled=False) == whole).all()


def test_rms_norm() -> None:
    x, weight = normal(0, 5, 30), normal(1, 30)
    expected = [
        [
            float(v) / math.sqrt(sum(float(u) ** 2 for u in row) / 30 + 1e-5) * float(w)
            for v, w in zip(row, weight, strict=True)
        ]
        for row in x
    ]
    np.testing.assert_allclose(ops.rms_norm(x, weight, 1e-5), expected, **CLOSE)


def test_layer_norm() -> None:
    x, weight = normal(0, 5, 30) + 3, normal(1, 30)
    expected = []
    for row in x.tolist():
        mean = sum(row) / 30
        deviation = math.sqrt(sum((v - mean) ** 2 for v in row) / 30 + 1e-5)
        expected.append([(v - mean) / deviation * float(w) for v, w in zip(row, weight, strict=True)])
    np.testing.assert_allclose(ops.layer_norm(x, weight, 1e-5), expected, **CLOSE)


def test_gelu() -> None:
    x = np.append(normal(0, 40) * 3, np.array([-1e20, 1e20], dtype=np.float32))
    expected = [v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.tolist()]
    np.testing.assert_allclose(ops.gelu(x), expected, **CLOSE)


def test_softcap() -> None:
    x = normal(0, 40) * 30
    np.testing.assert_allclose(ops.softcap(x, 7.0), [7 * math.tanh(v / 7) for v in x.tolist()], **CLOSE)
    assert ops.softcap(x, None) is x


def test_swiglu() -> None:
    gate_up = normal(0, 4, 20) * 3
    expected = [
        [g / (1 + math.exp(-g)) * u for g, u in zip(row[:10], row[10:], strict=True)]
        for row in gate_up.tolist()
    ]
    np.testing.assert_allclose(ops.swiglu(gate_up), expected, **CLOSE)
    extreme = np.array([[-200.0, 200.0, 1.0, 1.0]], dtype=np.float32)
    assert ops.swiglu(extreme).tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    x, positions, frequencies = normal(0, 3, 2, 8), np.array([0, 5, 100_000]), 10_000.0 ** (-np.arange(4) / 4)
    cosine, sine = ops.rope_table(positions, frequencies, 1.25, np.float32)
    rotated = ops.rope(x, cosine, sine, interleaved=interleaved)
    for t, position in enumerate(positions):
        for head in range(2):
            for i in range(4):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
                pair = complex(x[t, head, a], x[t, head, b]) * 1.25
                angle = float(position) * float(frequencies[i])
                turned = pair * complex(math.cos(angle), math.sin(angle))
                np.testing.assert_allclose(
                    rotated[t, head, [a, b]], [turned.real, turned.imag], rtol=1e-5, atol=1e-6
                )


def test_embedding() -> None:
    assert ops.embedding(np.arange(6.0).reshape(3, 2), np.array([2, 0, 2])).tolist() == [
        [4, 5],
        [0, 1],
        [4, 5],
    ]


def attention_by_loops(q: Array, keys: Array, values: Array, visible: int) -> npt.NDArray[np.float64]:
    """One token: q (H, D), keys and values (L, G, D)."""
    heads, head_dim = q.shape
    mixed = np.zeros((heads, head_dim))
    for head in range(heads):
        kv = head // (heads // keys.shape[1])
        scores = [
            sum(float(q[head, d]) * float(keys[j, kv, d]) for d in range(head_dim)) / math.sqrt(head_dim)
            for j in range(visible)
        ]
        weights = [math.exp(score - max(scores)) for score in scores]
        for j, weight in enumerate(weights):
            mixed[head] += weight / sum(weights) * values[j, kv].astype(np.float64)
    return mixed


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 8), (4, 2, 6), (7, 1, 8), (14, 2, 4)])
def test_paged_attention(heads: int, kv_heads: int, head_dim: int) -> None:
    contexts, queries = [5, 20, 131], 3
    caches = [normal(seed, 200, kv_heads, head_dim) * 2 for seed in (1, 2)]
    for cache in caches:
        cache[190:] = np.nan  # pages that nobody may read
        cache[189] = 0
    rng = np.random.default_rng(3)
    rows = np.full((3, 256), 189)
    for group, context in enumerate(contexts):
        rows[group, :context] = rng.permutation(189)[:context]
    positions = np.array([[context - 3, context - 2, context - 1] for context in contexts])
    q = normal(4, 3, queries, heads, head_dim)
    mixed = ops.paged_attention(q, *caches, rows, positions)
    for group in range(3):
        keys, values = (cache[rows[group]] for cache in caches)
        for m in range(queries):
            expected = attention_by_loops(q[group, m], keys, values, positions[group, m] + 1)
            np.testing.assert_allclose(mixed[group, m], expected, **CLOSE)


def test_attention_does_not_depend_on_padding_chunking_or_company(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, q = normal(1, 400, 2, 16), normal(2, 400, 2, 16), normal(3, 1, 300, 6, 16)
    keys[399] = values[399] = 0
    rows = np.full((1, 384), 399)
    rows[0, :300] = np.random.default_rng(4).permutation(399)[:300]
    positions = np.arange(300)[None]
    whole = ops.paged_attention(q, keys, values, rows, positions)
    wide = np.full((5, 640), 399)
    wide[3, :300] = rows[0, :300]
    for token in (0, 1, 127, 128, 299):
        alone = ops.paged_attention(
            q[:, token : token + 1], keys, values, rows, positions[:, token : token + 1]
        )
        assert (alone[0, 0] == whole[0, token]).all()
        crowd = ops.paged_attention(
            np.repeat(q[:, token : token + 1], 5, axis=0),
            keys,
            values,
            wide,
            np.array([[9], [639], [0], [token], [50]]),
        )
        assert (crowd[3, 0] == whole[0, token]).all()
    monkeypatch.setattr(ops, "_MAX_SCORES", 20_000)
    assert (ops.paged_attention(q, keys, values, rows, positions) == whole).all()


def test_attention_survives_scores_that_overflow_half_precision() -> None:
    q = np.full((1, 1, 1, 4), 1e4, dtype=np.float32)
    keys = np.zeros((1, 128, 1, 4), dtype=np.float32)
    keys[0, :2, 0] = [[1e4] * 4, [-1e4] * 4]
    values = np.broadcast_to(np.arange(128, dtype=np.float32)[None, :, None, None], keys.shape)
    assert ops.attention(q, keys, values, np.array([[2]])).tolist() == [[[[0.0] * 4]]]
