"""What an FP8 cache leaves of keys and values, and what caches take."""

import numpy as np

from nightmill.worker.runners.gpu.kv_cache import PAGE, kinds_layout, page_bytes, pool_page_bytes
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference.fp8 import POWERS_OF_HALF, as_kept, exponents_of, round_e4m3
from tests.support.fp8_pages import VALUES
from tests.support.specs import GEMMAS, MIXTURES, PLAIN, VARIANTS, dense_spec

LARGEST = 448.0


def test_e4m3_rounds_to_the_nearest_and_ties_to_even() -> None:
    for sign in (1, -1):
        assert (round_e4m3(sign * VALUES[:127]) == sign * VALUES[:127]).all()
        between = (VALUES[:126] + VALUES[1:127]) / 2
        even = np.where(np.arange(126) % 2 == 0, VALUES[:126], VALUES[1:127])
        np.testing.assert_array_equal(round_e4m3(sign * between), sign * even)
        for direction, nearest in ((0, VALUES[:126]), (np.inf, VALUES[1:127])):
            np.testing.assert_array_equal(round_e4m3(sign * np.nextafter(between, direction)), sign * nearest)
    assert round_e4m3(np.array([500.0, 1e30, -1e30])).tolist() == [LARGEST, LARGEST, -LARGEST]


def test_the_power_is_the_least_that_fits() -> None:
    largest = np.array([1e-3, 0.01, 1.0, 1.75, 1.7501, LARGEST, 449.0, 60_000.0])[:, None]
    powers = 2.0 ** exponents_of(largest)
    assert (largest <= LARGEST * powers).all()
    assert (largest > LARGEST * powers / 2).all()
    assert exponents_of(largest * 1e-9, POWERS_OF_HALF).ravel().tolist() == [-14] * 8


def test_a_kept_row_is_within_a_sixteenth_and_half_can_hold_it() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 64)) * np.exp(rng.standard_normal((500, 1)) * 3)
    kept = as_kept(x, POWERS_OF_HALF)
    clear = np.abs(x) > np.abs(x).max(axis=1, keepdims=True) / 1000
    assert (np.abs(kept - x)[clear] <= np.abs(x)[clear] / 16).all()
    np.testing.assert_array_equal(kept.astype(np.float16), kept)
    np.testing.assert_array_equal(as_kept(kept, POWERS_OF_HALF), kept)
    assert np.square(kept - x).sum() < 1e-3 * np.square(x).sum()


def test_a_row_that_is_not_finite_is_lost_and_no_other() -> None:
    x = np.ones((4, 8), dtype=np.float32)
    x[1, 3], x[2, 0] = np.inf, np.nan
    kept = as_kept(x)
    assert kept.dtype == np.float32
    assert np.isnan(kept).all(axis=1).tolist() == [False, True, True, False]
    assert (kept[[0, 3]] == 1).all()


def test_the_same_memory_holds_nearly_twice_the_tokens() -> None:
    for head_dim, times in ((64, 1.96), (128, 1.98)):
        spec = dense_spec(heads=4, kv_heads=2, head_dim=head_dim)
        plain, fp8 = (page_bytes(spec, kv) for kv in KvFormat)
        assert fp8 == len(spec.layers) * 2 * 2 * PAGE * (head_dim + 1) + 4 * PAGE
        assert times < (plain - 4 * PAGE) / (fp8 - 4 * PAGE) < 2


def test_layers_that_read_others_keys_take_no_pages_on_a_gpu() -> None:
    spec = GEMMAS["layers that read others' keys"]
    whole, window = (
        2 * 24 * 1,
        2 * 16 * 2,
    )  # keys and values of a token, of the two layers that have their own
    assert page_bytes(spec) == PAGE * (whole + window) * 2 + 4 * PAGE
    layout = kinds_layout(spec)
    assert layout is not None and layout.layers[2:] == (None, None)
    assert pool_page_bytes(spec) == 2 * layout.numbers + 4 * PAGE * layout.kinds[0].stride


def test_one_kind_stays_where_prompts_pages_become_elements_and_where_all_have_windows() -> None:
    both = VARIANTS["window, then all"]
    assert kinds_layout(both) is not None
    for spec, kv in (
        (both, KvFormat.FP8), (VARIANTS["window"], KvFormat.ELEMENT), (PLAIN, KvFormat.ELEMENT),
        (MIXTURES["fused experts, latent attention"], KvFormat.ELEMENT),
    ):  # fmt: skip
        assert kinds_layout(spec, kv) is None
        assert pool_page_bytes(spec, kv) == page_bytes(spec, kv)
