"""Products on the GPU against float64, at sizes that fit no tile, with poison all around."""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.gemm import Gemm, padded_rows
from nightmill.worker.runners.gpu.hopper import TILES, HopperProducts, Kind, Tile, first_sum, is_hopper
from nightmill.worker.runners.gpu.kernels import Kernels
from nightmill.worker.runners.gpu.split import SPLIT_TILES, HopperSplit, SplitTile, split_tiles
from tests.gpu.comparing import nmse
from tests.specs import dense_spec

LIMIT = 5e-5
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 65, 257, 1000)
SIZES = ((1152, 896), (896, 4864), (9728, 896), (515, 72), (4096, 256))  # outputs, inputs


def operands(rows: int, outputs: int, inputs: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    rng = np.random.default_rng(rows * outputs + inputs)
    x = rng.standard_normal((rows, inputs)).astype(np.float16)
    return x, (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float16)


@pytest.mark.parametrize("floats", [False, True], ids=["half", "float"])
@pytest.mark.parametrize("own", [False, True], ids=["cublaslt", "own"])
def test_products_are_exact_to_rounding(device: Device, own: bool, floats: bool) -> None:
    gemm = Gemm(device, own_kernels=own)
    dtype = np.float32 if floats else np.float16
    for outputs, inputs in SIZES:
        for rows in ROWS if not own else ROWS[:8]:
            x, weight = operands(rows, outputs, inputs)
            room = padded_rows(rows)
            poisoned = np.full((room + 1, inputs), np.nan, dtype=np.float16)
            poisoned[:rows] = x
            y = device.upload(np.full((room + 1, outputs), np.nan, dtype=dtype))
            addresses = device.upload(poisoned), device.upload(weight)
            gemm(*addresses, y, rows, outputs, inputs, floats=floats)
            result = device.download(y, (room + 1, outputs), dtype)
            error = nmse(result[:rows], x.astype(np.float64) @ weight.astype(np.float64).T)
            assert error <= (1e-10 if floats else 1e-6) <= LIMIT, (rows, outputs, inputs, error)
            assert np.isnan(result[room]).all(), "wrote past its rows"
            for address in (*addresses, y):
                device.free(address)
    gemm.close()


def test_every_candidate_and_the_tuned_choice_agree(device: Device) -> None:
    gemm = Gemm(device)
    for rows, outputs, inputs in ((1, 896, 896), (4, 1152, 896), (8, 896, 4864), (256, 896, 4864)):
        x, weight = operands(rows, outputs, inputs)
        y = device.upload(np.full((rows, outputs), np.nan, dtype=np.float16))
        addresses = device.upload(x), device.upload(weight)
        gemm.tune(addresses[0], [addresses[1]], y, (rows, outputs, inputs, Kind.HALF))
        device.fill(y, 0xFF, rows * outputs * 2)
        gemm(*addresses, y, rows, outputs, inputs)
        result = device.download(y, (rows, outputs), np.float16)
        assert nmse(result, x.astype(np.float64) @ weight.astype(np.float64).T) <= 1e-6
    gemm.close()


@pytest.mark.parametrize("tuned", [False, True], ids=["guessed", "tuned"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(device: Device, tuned: bool) -> None:
    gemm = Gemm(device, reproducible=True)
    for outputs, inputs in (*SIZES[:3], (256, 832)):
        x, weight = operands(1024, outputs, inputs)
        out = device.allocate(1024 * outputs * 2)
        addresses = device.upload(x), device.upload(weight)
        expected = None
        for rows in (1024, 1, 2, 5, 8, 9, 24, 63, 65, 200, 256, 300, 700):
            if tuned:
                gemm.tune(addresses[0], [addresses[1]], out, (rows, outputs, inputs, Kind.HALF))
            gemm(*addresses, out, rows, outputs, inputs)
            result = device.download(out, (rows, outputs), np.float16)
            expected = result if expected is None else expected
            np.testing.assert_array_equal(result, expected[:rows], err_msg=f"{rows} {outputs} {inputs}")
    gemm.close()


@pytest.fixture
def hopper(device: Device) -> HopperProducts:
    if not is_hopper(device):
        pytest.skip("these kernels run on Hopper only")
    return HopperProducts(device)


@pytest.mark.parametrize("tile", TILES[Kind.HALF], ids=str)
def test_every_hopper_tile_gives_the_librarys_bits(
    device: Device, hopper: HopperProducts, tile: Tile
) -> None:
    gemm = Gemm(device, own_kernels=False, reproducible=True)
    for outputs, inputs in ((1152, 896), (896, 4864), (520, 72)):
        for rows in (1, 7, 63, 65, 257, 1000):
            x, weight = operands(rows, outputs, inputs)
            addresses = device.upload(x), device.upload(weight)
            results = []
            for own in (True, False):
                y = device.upload(np.full((padded_rows(rows) + 1, outputs), np.nan, dtype=np.float16))
                if own:
                    hopper.run(Kind.HALF, tile, *addresses, y, rows, outputs, inputs)
                else:
                    room = np.zeros((padded_rows(rows), inputs), dtype=np.float16)
                    room[:rows] = x
                    gemm(device.upload(room), addresses[1], y, rows, outputs, inputs)
                results.append(device.download(y, (padded_rows(rows) + 1, outputs), np.float16))
            np.testing.assert_array_equal(results[0][:rows], results[1][:rows], err_msg=f"{rows} {outputs}")
            assert np.isnan(results[0][rows:]).all(), "wrote past its rows"
    gemm.close()


@pytest.mark.parametrize("tile", TILES[Kind.SWIGLU], ids=str)
def test_swiglu_in_a_product_gives_the_bits_of_two_kernels(
    device: Device, hopper: HopperProducts, tile: Tile
) -> None:
    gemm = Gemm(device, own_kernels=False, reproducible=True)
    kernels = Kernels(device, dense_spec(), max_context=64)
    for ffn, inputs in ((4864, 896), (520, 72)):
        for rows in (1, 65, 300, 1000):
            x, weight = operands(padded_rows(rows), 2 * ffn, inputs)
            addresses = device.upload(x), device.upload(weight)
            gate_up = device.allocate(padded_rows(rows) * 4 * ffn)
            fused, plain = (
                device.upload(np.full((rows + 1, ffn), np.nan, dtype=np.float16)) for _ in range(2)
            )
            gemm(*addresses, gate_up, rows, 2 * ffn, inputs)
            kernels.swiglu(gate_up, plain, rows, ffn)
            hopper.run(Kind.SWIGLU, tile, *addresses, fused, rows, ffn, inputs)
            result, expected = (device.download(y, (rows + 1, ffn), np.float16) for y in (fused, plain))
            np.testing.assert_array_equal(result[:rows], expected[:rows], err_msg=f"{rows} {ffn}")
            assert np.isnan(result[rows]).all(), "wrote past its rows"
    gemm.close()


ADDED = ((896, 896), (896, 4864), (2048, 4864), (520, 72))  # outputs, inputs


def residual_operands(
    device: Device, rows: int, outputs: int, inputs: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], int, int]:
    """What is added to, the exact sum, and the addresses of x, with poison behind, and of the weight."""
    x, weight = operands(rows, outputs, inputs)
    before = np.random.default_rng(rows).standard_normal((rows, outputs)).astype(np.float32)
    poisoned = np.full((padded_rows(rows) + 1, inputs), np.nan, dtype=np.float16)
    poisoned[:rows] = x
    exact = before + x.astype(np.float64) @ weight.astype(np.float64).T
    return before, exact, device.upload(poisoned), device.upload(weight)


def with_poison(device: Device, before: npt.NDArray[np.float32]) -> int:
    """Room for `padded_rows` and a row more, NaN but for `before`."""
    rows, outputs = before.shape
    y = np.full((padded_rows(rows) + 1, outputs), np.nan, dtype=np.float32)
    y[:rows] = before
    return device.upload(y)


Adds = Callable[[int, int, int, int, int, int], None]  # x, weight, y, rows, outputs, inputs


def assert_they_add_the_same_bits(
    device: Device, ways: tuple[Adds, Adds], rows: int, outputs: int, inputs: int
) -> None:
    """And the right ones; the first writes nothing but its rows."""
    before, exact, *addresses = residual_operands(device, rows, outputs, inputs)
    results = []
    for add in ways:
        y = with_poison(device, before)
        add(*addresses, y, rows, outputs, inputs)
        results.append(device.download(y, (padded_rows(rows) + 1, outputs), np.float32))
        device.free(y)
    np.testing.assert_array_equal(results[0][:rows], results[1][:rows], err_msg=f"{rows} {outputs}")
    assert nmse(results[0][:rows], exact) < 1e-10
    assert np.isnan(results[0][rows:]).all(), "wrote past its rows"
    for address in addresses:
        device.free(address)


@pytest.mark.parametrize("tile", TILES[Kind.RESIDUAL], ids=str)
def test_every_hopper_tile_adds_the_librarys_bits(device: Device, hopper: HopperProducts, tile: Tile) -> None:
    gemm = Gemm(device, own_kernels=False, reproducible=True)
    own = partial(hopper.run, Kind.RESIDUAL, tile)
    for outputs, inputs in ADDED:
        for rows in (1, 7, 63, 65, 257, 1000):
            assert_they_add_the_same_bits(device, (own, gemm.residual), rows, outputs, inputs)
    gemm.close()


@pytest.mark.parametrize("tile", SPLIT_TILES, ids=lambda tile: tile.name)
def test_blocks_that_share_k_add_the_bits_of_one_that_has_it_all(
    device: Device, hopper: HopperProducts, tile: SplitTile
) -> None:
    ways = (
        partial(HopperSplit(device).run, tile),
        partial(hopper.run, Kind.RESIDUAL, TILES[Kind.RESIDUAL][-1]),
    )
    suited = [sizes for sizes in (*ADDED, (48, 4104), (8, 1000)) if tile.suits(*sizes)]
    assert suited
    for outputs, inputs in suited:
        for rows in (1, 9, 16, 33, 65, 130, 200, 257):
            assert_they_add_the_same_bits(device, ways, rows, outputs, inputs)


def test_many_inputs_are_two_sums_of_which_the_second_is_added_last(
    device: Device, hopper: HopperProducts
) -> None:
    """Numbers between which the order of additions makes all the difference."""
    outputs, inputs = 64, 4864
    first = first_sum(outputs, inputs)
    assert inputs // 2 == first
    x = np.zeros((1, inputs), dtype=np.float16)
    x[0, [0, first - 1, first, inputs - 1]] = 1.0
    weight = np.zeros((outputs, inputs), dtype=np.float16)
    weight[:, [0, first - 1, inputs - 1]], weight[:, first] = 2**-12, 2**-10
    before = np.full((1, outputs), 8192.0, dtype=np.float32)  # neighbours are 2^-10 apart
    sums = np.float32(2**-11), np.float32(2**-10 + 2**-12)
    expected = before[0, 0] + sums[0] + sums[1]  # the first changes nothing
    assert expected == 8192 + 2**-10
    assert expected != before[0, 0] + (sums[0] + sums[1])
    assert expected != before[0, 0] + sums[1] + sums[0]
    addresses = device.upload(x), device.upload(weight)
    ways: list[Adds] = [partial(hopper.run, Kind.RESIDUAL, tile) for tile in TILES[Kind.RESIDUAL]]
    ways += [partial(HopperSplit(device).run, tile) for tile in SPLIT_TILES if tile.suits(outputs, inputs)]
    ways.append(Gemm(device, own_kernels=False, reproducible=True).residual)
    for way in ways:
        y = with_poison(device, before)
        way(*addresses, y, 1, outputs, inputs)
        result = device.download(y, (1, outputs), np.float32)
        np.testing.assert_array_equal(result, expected, err_msg=str(way))


def test_a_launch_that_waits_for_the_one_before_sees_its_sums(device: Device, hopper: HopperProducts) -> None:
    rows, outputs, inputs = 64, 896, 4864
    before, exact, *addresses = residual_operands(device, rows, outputs, inputs)
    shared_k, times = HopperSplit(device), 30
    for tile in split_tiles(rows, outputs, inputs):
        y = device.upload(before)
        for _ in range(times):
            shared_k.run(tile, *addresses, y, rows, outputs, inputs)
        wanted = before + times * (exact - before)
        assert nmse(device.download(y, (rows, outputs), np.float32), wanted) < 1e-10


@pytest.mark.parametrize("kind", [Kind.RESIDUAL, Kind.SWIGLU], ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows_whatever_becomes_of_it(
    device: Device, kind: Kind
) -> None:
    kernels = Kernels(device, dense_spec(), max_context=64)
    for outputs, inputs in ADDED if kind is Kind.RESIDUAL else ((4864, 896), (520, 72)):
        gemm = Gemm(device, reproducible=True)
        most = 4096
        gemm.separate_swiglu(kernels.swiglu, device.allocate(most * 4 * outputs))
        x, weight = operands(most, outputs * (1 + (kind is Kind.SWIGLU)), inputs)
        before = np.random.default_rng(0).standard_normal((most, outputs)).astype(np.float32)
        addresses = device.upload(x), device.upload(weight)
        y, dtype = device.allocate(most * outputs * 4), np.float32 if kind is Kind.RESIDUAL else np.float16
        expected = None
        for rows in (most, 1, 2, 5, 9, 24, 63, 65, 200, 256, 300, 700, 1024, 1500):
            gemm.tune(addresses[0], [addresses[1]], y, (rows, outputs, inputs, kind))
            device.copy_in(y, before)
            device.synchronize()
            run = gemm.residual if kind is Kind.RESIDUAL else gemm.swiglu
            run(*addresses, y, rows, outputs, inputs)
            result = device.download(y, (rows, outputs), dtype)
            expected = result if expected is None else expected
            np.testing.assert_array_equal(result, expected[:rows], err_msg=f"{rows} {outputs} {inputs}")
        assert expected is not None
        assert np.isfinite(expected).all()
        gemm.close()


def test_many_rows_are_computed_as_was_fastest_at_the_nearest_size_tried(device: Device) -> None:
    gemm = Gemm(device, reproducible=True)
    outputs, inputs = 896, 896
    x, weight = operands(4096, outputs, inputs)
    y = device.allocate(4096 * outputs * 2)
    addresses = device.upload(x), device.upload(weight)
    gemm.tune(addresses[0], [addresses[1]], y, (4096, outputs, inputs, Kind.HALF))
    for rows in (1025, 3000, 4096):
        device.fill(y, 0xFF, 4096 * outputs * 2)
        gemm(*addresses, y, rows, outputs, inputs)
        result = device.download(y, (rows, outputs), np.float16)
        assert nmse(result, x[:rows].astype(np.float64) @ weight.astype(np.float64).T) <= 1e-6
    gemm.close()


def test_a_fault_of_one_percent_would_be_seen() -> None:
    x, weight = operands(65, 515, 72)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    assert nmse(expected * 1.01, expected) > LIMIT
    broken = expected.copy()
    broken[0, 0] = np.nan
    assert nmse(broken, expected) > LIMIT
