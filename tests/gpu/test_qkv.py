"""Queries, keys and values in one launch have the bits of the product and the kernel after it."""

from collections.abc import Iterator

import numpy as np
import pytest

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import INT, Format
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.elements.hopper_gemm import Tile
from nightmill.worker.runners.gpu.products.elements.hopper_qkv import QKV_TILES, HopperQkv
from nightmill.worker.runners.gpu.products.qkv import Qkv
from nightmill.worker.runners.gpu.shapes import padded_rows
from tests.gpu.test_few_rows import CONTEXT, MODELS, Bench
from tests.support.elements import BOTH_ELEMENTS, ELEMENTS_AND_KV
from tests.support.needs import Need, missing
from tests.support.operands import all_products, elements, fetched, inputs_of, room
from tests.support.specs import dense_spec

SOME_MODELS = MODELS | {"no-bias": {"bias": False}}
WHOLE_HEADS = [
    (name, tile)
    for name, changes in SOME_MODELS.items()
    for tile in QKV_TILES
    if tile.columns % dense_spec(**changes).layers[0].attention.head_dim == 0
]


@pytest.fixture(params=SOME_MODELS)
def bench(device: Device, request: pytest.FixtureRequest) -> Bench:
    spec = dense_spec(**SOME_MODELS[request.param])
    if not HopperQkv.suits(spec.layers[0].attention, device.element.format, hopper=device.hopper):
        missing(Need.HOPPER)
    return Bench(device, spec)


@pytest.fixture
def products(device: Device) -> Iterator[Products]:
    with all_products(device) as products:
        yield products


def either_way(bench: Bench, products: Products) -> Qkv:
    """In two launches where nothing else was tuned."""
    return Qkv(bench.device, bench.attention, bench.layer.qkv, products, bench.rotation)


@ELEMENTS_AND_KV
@pytest.mark.parametrize(("bench", "tile"), WHOLE_HEADS, indirect=["bench"], ids=str)
@pytest.mark.parametrize("tokens", [1, 63, 65, 300, 1000])
def test_every_tile_gives_the_bits_of_two_launches(
    bench: Bench, products: Products, tile: Tile, tokens: int
) -> None:
    device, attention, width = bench.device, bench.attention, bench.spec.width
    fused = HopperQkv(device, attention, bench.rotation.table)
    assert tile in fused.tiles
    padded = padded_rows(tokens)
    values = np.full((padded, width), np.nan, dtype=np.float32)
    values[:tokens] = bench.rng.standard_normal((tokens, width))
    x = elements(device, values)
    positions = bench.rng.integers(0, CONTEXT, tokens, dtype=np.int32)
    pages = -(-tokens // PAGE) + 2
    rows = bench.rng.permutation(pages * PAGE)[:tokens].astype(np.int32)
    rows[::7] = -1  # not written
    inputs = inputs_of(device, positions=positions, cache_rows=rows)
    plain = either_way(bench, products)
    results = []
    for own in (True, False):
        qkv, cache = bench.poison(padded + 1, bench.qkv_width), bench.pages(pages)
        if own:
            fused.run(tile, x, bench.layer, inputs.positions, inputs.cache_rows, qkv, cache, tokens)
        else:
            plain(x, bench.layer, inputs, qkv, cache, tokens)
        queries = fetched(device, qkv)
        if own:
            assert np.isnan(queries[tokens:]).all(), "wrote past its rows"
        results.append((queries[:tokens, : bench.queries], *bench.held(cache)))
        for held in (qkv, cache.keys, cache.values):
            device.free(held.address)
    assert np.isfinite(results[0][0]).all()
    written = np.count_nonzero(rows >= 0) * attention.keys
    assert np.isfinite(results[0][1]).sum() == np.isfinite(results[0][2]).sum() == written
    for own_array, plain_array in zip(*results, strict=True):
        np.testing.assert_array_equal(own_array, plain_array)


@BOTH_ELEMENTS
def test_the_tuned_choice_serves_all_numbers_of_tokens(bench: Bench, products: Products) -> None:
    device, width = bench.device, bench.spec.width
    tokens, padded = 3000, padded_rows(3000)
    x = elements(device, bench.rng.standard_normal((padded, width)))
    pages = -(-tokens // PAGE)
    positions, rows = (np.arange(tokens, dtype=np.int32) for _ in range(2))
    inputs = inputs_of(device, positions=positions, cache_rows=rows)
    untuned, tuned = (either_way(bench, products) for _ in range(2))
    qkv, cache, numbers = (
        bench.poison(padded, bench.qkv_width),
        bench.pages(pages),
        room(device, (padded,), INT),
    )
    for rows_tried in (padded, 1536, 256, 1):
        tuned.tune(x, [bench.layer], qkv, cache, numbers, rows_tried, lambda: None)
    assert all(np.isnan(held).all() for held in bench.held(cache)), "tuning wrote to the pages"
    for count in (1, 17, 250, 1100, tokens):
        results = []
        for way in (untuned, tuned):
            out, own = bench.poison(padded, bench.qkv_width), bench.pages(pages)
            way(x, bench.layer, inputs, out, own, count)
            results.append((fetched(device, out, count)[:, : bench.queries], *bench.held(own)))
            for held in (out, own.keys, own.values):
                device.free(held.address)
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)


def test_models_with_other_sizes_take_two_launches() -> None:
    odd = [dense_spec(qk_norm=True), dense_spec(head_dim=96, heads=10)]
    assert not any(HopperQkv.suits(spec.layers[0].attention, Format.F16, hopper=True) for spec in odd)
