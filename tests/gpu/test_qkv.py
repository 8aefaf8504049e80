"""Queries, keys and values in one launch have the bits of the product and the kernel after it."""

import numpy as np
import pytest

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.gemm import padded_rows
from nightmill.worker.runners.gpu.hopper import QKV_TILES, HopperQkv, Tile, is_hopper
from nightmill.worker.runners.gpu.qkv import Qkv
from tests.gpu.oracles import PAGE
from tests.gpu.test_few_rows import CONTEXT, MODELS, Bench, inputs_of
from tests.specs import dense_spec

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
    if not (is_hopper(device) and HopperQkv.suits(spec)):
        pytest.skip("these kernels run on Hopper only")
    return Bench(device, spec)


@pytest.mark.parametrize(("bench", "tile"), WHOLE_HEADS, indirect=["bench"], ids=str)
@pytest.mark.parametrize("tokens", [1, 63, 65, 300, 1000])
def test_every_tile_gives_the_bits_of_two_launches(bench: Bench, tile: Tile, tokens: int) -> None:
    device, spec, attention = bench.device, bench.spec, bench.attention
    fused = HopperQkv(device, spec, bench.kernels.rope_table, CONTEXT)
    assert tile in fused.tiles
    room = padded_rows(tokens)
    x = np.full((room, spec.width), np.nan, dtype=np.float16)
    x[:tokens] = bench.rng.standard_normal((tokens, spec.width))
    address = device.upload(x)
    positions = bench.rng.integers(0, CONTEXT, tokens, dtype=np.int32)
    pages = -(-tokens // PAGE) + 2
    rows = bench.rng.permutation(pages * PAGE)[:tokens].astype(np.int32)
    rows[::7] = -1  # not written
    inputs = inputs_of(device, positions=positions, cache_rows=rows)
    shape = (pages, attention.kv_heads, PAGE, attention.head_dim)
    plain = Qkv(device, spec, bench.kernels, bench.gemm, max_context=CONTEXT)
    results = []
    for own in (True, False):
        qkv = bench.poison(room + 1, bench.qkv_width)
        keys, values = bench.poison(*shape), bench.poison(*shape)
        if own:
            fused.run(
                tile, address, bench.layer.qkv, bench.layer.qkv_bias, inputs.positions, inputs.cache_rows,
                qkv, keys, values, tokens, room,
            )  # fmt: skip
        else:
            plain(address, bench.layer, inputs, qkv, keys, values, tokens)
        queries = device.download(qkv, (room + 1, bench.qkv_width), np.float16)
        if own:
            assert np.isnan(queries[tokens:]).all(), "wrote past its rows"
        caches = (device.download(cache, shape, np.float16) for cache in (keys, values))
        results.append((queries[:tokens, : bench.queries], *caches))
        for array in (qkv, keys, values):
            device.free(array)
    assert np.isfinite(results[0][0]).all()
    written = np.count_nonzero(rows >= 0) * attention.keys
    assert np.isfinite(results[0][1]).sum() == np.isfinite(results[0][2]).sum() == written
    for own_array, plain_array in zip(*results, strict=True):
        np.testing.assert_array_equal(own_array, plain_array)


def test_the_tuned_choice_serves_all_numbers_of_tokens(bench: Bench) -> None:
    device, spec, attention = bench.device, bench.spec, bench.attention
    tokens, room = 3000, padded_rows(3000)
    x = device.upload(bench.rng.standard_normal((room, spec.width)).astype(np.float16))
    pages = -(-tokens // PAGE)
    positions, rows = (np.arange(tokens, dtype=np.int32) for _ in range(2))
    inputs = inputs_of(device, positions=positions, cache_rows=rows)
    shape = (pages, attention.kv_heads, PAGE, attention.head_dim)
    untuned, tuned = (Qkv(device, spec, bench.kernels, bench.gemm, max_context=CONTEXT) for _ in range(2))
    scratch = bench.poison(room, bench.qkv_width), bench.poison(*shape), bench.poison(*shape)
    numbers = device.allocate(4 * room)
    for rows_tried in (room, 1536, 256, 1):
        tuned.tune(x, [bench.layer], *scratch, numbers, rows_tried)
    assert np.isnan(device.download(scratch[1], shape, np.float16)).all(), "tuning wrote to the pages"
    for count in (1, 17, 250, 1100, tokens):
        results = []
        for qkv in (untuned, tuned):
            out, keys, values = (
                bench.poison(room, bench.qkv_width),
                bench.poison(*shape),
                bench.poison(*shape),
            )
            qkv(x, bench.layer, inputs, out, keys, values, count)
            queries = device.download(out, (room, bench.qkv_width), np.float16)[:count, : bench.queries]
            results.append((queries, *(device.download(a, shape, np.float16) for a in (keys, values))))
            for array in (out, keys, values):
                device.free(array)
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)


def test_models_with_other_sizes_take_two_launches(device: Device) -> None:
    odd: list[ModelSpec] = [dense_spec(qk_norm=True), dense_spec(head_dim=96, heads=10)]
    assert not any(HopperQkv.suits(spec) for spec in odd)
