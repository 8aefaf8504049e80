"""Products on the GPU against float64, at sizes that fit no tile, with poison all around."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Buffer, Matrix
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.elements.hopper_gemm import TILES, HopperTiles, Tile
from nightmill.worker.runners.gpu.products.elements.hopper_split import (
    SPLIT_TILES,
    SplitTile,
    SplitTiles,
    split_tiles,
)
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import (
    GATED,
    SUMMED,
    Kernel,
    Kind,
    Shape,
    first_sum,
    padded_rows,
)
from tests.support.comparing import nmse
from tests.support.elements import BOTH_ELEMENTS, ROUNDED_ONCE, rounded
from tests.support.needs import Need, missing
from tests.support.operands import (  # fmt: skip
    Array,
    ByLibrary,
    all_products,
    buffer,
    elements,
    fetched,
    matrix,
    poisoned,
    room,
)

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 65, 257, 1000)
SIZES = ((1152, 896), (896, 4864), (9728, 896), (515, 72), (4096, 256))  # outputs, inputs

Kernels = Callable[[Shape], Kernel]


def operands(element: Element, rows: int, outputs: int, inputs: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(rows * outputs + inputs)
    weights = rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)
    return rounded(rng.standard_normal((rows, inputs)), element), rounded(weights, element)


def product_of(x: Array, weight: Array) -> npt.NDArray[np.float64]:
    """Their product, to the last bit but few."""
    exact: npt.NDArray[np.float64] = x.astype(np.float64) @ weight.astype(np.float64).T
    return exact


def followed_by_poison(
    device: Device, array: Array, upload: Callable[[Device, Array], Buffer] = elements
) -> Buffer:
    """The rows of an array, and NaN up to `padded_rows` and one row more."""
    rows = len(array)
    held = np.full((padded_rows(rows) + 1, *array.shape[1:]), np.nan, dtype=array.dtype)
    held[:rows] = array
    return upload(device, held)


@pytest.fixture
def products(device: Device) -> Iterator[Products]:
    with all_products(device) as products:
        yield products


@pytest.fixture
def library(device: Device) -> Iterator[ByLibrary]:
    library = ByLibrary(device)
    yield library
    library.close()


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.FLOAT], ids=str)
def test_products_are_exact_to_rounding(device: Device, library: ByLibrary, kind: Kind) -> None:
    floats = kind is Kind.FLOAT
    for outputs, inputs in SIZES:
        for rows in ROWS:
            values, weights = operands(device.element, rows, outputs, inputs)
            x, weight = followed_by_poison(device, values), matrix(device, weights)
            padded = padded_rows(rows)
            y = poisoned(device, (padded + 1, outputs), FLOAT if floats else ELEMENT)
            library(x, weight, y, rows, kind)
            result = fetched(device, y)
            error = nmse(result[:rows], product_of(values, weights))
            assert error <= (1e-10 if floats else ROUNDED_ONCE[device.element]), (
                rows,
                outputs,
                inputs,
                error,
            )
            assert np.isnan(result[padded]).all(), "wrote past its rows"
            for held in (x, weight, y):
                device.free(held.address)


@BOTH_ELEMENTS
@pytest.mark.parametrize("tuned", [False, True], ids=["guessed", "tuned"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    device: Device, products: Products, tuned: bool
) -> None:
    for outputs, inputs in (*SIZES[:3], (256, 832)):
        product = products.of(Kind.PLAIN, outputs, inputs)
        values, weights = operands(device.element, 1024, outputs, inputs)
        x, weight = elements(device, values), matrix(device, weights)
        y, any_x = room(device, (1024, outputs), ELEMENT), room(device, (1024, inputs), ELEMENT)
        expected = None
        for rows in (1024, 1, 2, 5, 8, 9, 24, 63, 65, 200, 256, 300, 700):
            if tuned:
                product.tune(any_x, [weight], y, rows, lambda: None)
            product(x, weight, y, rows)
            result = fetched(device, y, rows)
            expected = result if expected is None else expected
            np.testing.assert_array_equal(result, expected[:rows], err_msg=f"{rows} {outputs} {inputs}")
        assert expected is not None
        assert nmse(expected, product_of(values, weights)) <= ROUNDED_ONCE[device.element]


@pytest.fixture
def hopper(device: Device) -> HopperTiles:
    if not device.hopper:
        missing(Need.HOPPER)
    return HopperTiles(device, tuple(Kind))


@BOTH_ELEMENTS
@pytest.mark.parametrize("tile", TILES[Kind.PLAIN], ids=str)
def test_every_hopper_tile_gives_the_librarys_bits(
    device: Device, hopper: HopperTiles, library: ByLibrary, tile: Tile
) -> None:
    for outputs, inputs in ((1152, 896), (896, 4864), (520, 72)):
        for rows in (1, 7, 63, 65, 257, 1000):
            values, weights = operands(device.element, rows, outputs, inputs)
            weight = matrix(device, weights)
            padded = np.zeros((padded_rows(rows), inputs), dtype=np.float32)
            padded[:rows] = values
            own, theirs = (poisoned(device, (len(padded) + 1, outputs), ELEMENT) for _ in range(2))
            shape = Shape(rows, outputs, inputs, Kind.PLAIN, device.element.format)
            hopper.kernel(tile, shape)(elements(device, values), weight, own)
            library(elements(device, padded), weight, theirs, rows)
            result, expected = fetched(device, own), fetched(device, theirs)
            np.testing.assert_array_equal(result[:rows], expected[:rows], err_msg=f"{rows} {outputs}")
            assert np.isnan(result[rows:]).all(), "wrote past its rows"


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", [Kind.SWIGLU, Kind.GEGLU])
@pytest.mark.parametrize("tile", TILES[Kind.SWIGLU], ids=str)
def test_an_activation_in_a_product_gives_the_bits_of_two_kernels(
    device: Device, hopper: HopperTiles, library: ByLibrary, tile: Tile, kind: Kind
) -> None:
    activate = Activate(device)
    for ffn, inputs in ((4864, 896), (520, 72)):
        for rows in (1, 65, 300, 1000):
            values, weights = operands(device.element, padded_rows(rows), 2 * ffn, inputs)
            x, weight = elements(device, values), matrix(device, weights)
            gate_up = room(device, (padded_rows(rows), 2 * ffn), ELEMENT)
            fused, plain = (poisoned(device, (rows + 1, ffn), ELEMENT) for _ in range(2))
            library(x, weight, gate_up, rows)
            activate(gate_up, plain, rows, GATED[kind])
            hopper.kernel(tile, Shape(rows, ffn, inputs, kind, device.element.format))(x, weight, fused)
            result, expected = fetched(device, fused), fetched(device, plain)
            np.testing.assert_array_equal(result[:rows], expected[:rows], err_msg=f"{rows} {ffn}")
            assert np.isnan(result[rows]).all(), "wrote past its rows"


ADDED = ((896, 896), (896, 4864), (2048, 4864), (520, 72))  # outputs, inputs
SMALL = ((64, 24), (64, 96), (104, 136))  # inputs that are no whole stages, or less than one


def residual_operands(
    device: Device, rows: int, outputs: int, inputs: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], Buffer, Matrix]:
    """What is added to, the exact sum, x, with poison behind, and the weight."""
    values, weights = operands(device.element, rows, outputs, inputs)
    before = np.random.default_rng(rows).standard_normal((rows, outputs)).astype(np.float32)
    exact = before + product_of(values, weights)
    return before, exact, followed_by_poison(device, values), matrix(device, weights)


def assert_they_give_the_same_bits(
    device: Device, kind: Kind, own: Kernels, other: Kernels, rows: int, outputs: int, inputs: int
) -> None:
    """And the right ones; the first, of exactly so many rows, writes nothing else. The other is padded."""
    before, exact, x, weight = residual_operands(device, rows, outputs, inputs)
    if kind is Kind.ADDEND:  # which does not read what was there
        exact -= before
        before = np.full_like(before, np.nan)
    results = []
    for ways, count in ((own, rows), (other, padded_rows(rows))):
        y = followed_by_poison(device, before, buffer)
        ways(Shape(count, outputs, inputs, kind, device.element.format))(x, weight, y)
        results.append(fetched(device, y))
        device.free(y.address)
    np.testing.assert_array_equal(results[0][:rows], results[1][:rows], err_msg=f"{rows} {outputs}")
    assert nmse(results[0][:rows], exact) < 1e-10
    assert np.isnan(results[0][rows:]).all(), "wrote past its rows"
    for operand in (x, weight):
        device.free(operand.address)


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", SUMMED)
@pytest.mark.parametrize("tile", TILES[Kind.RESIDUAL], ids=str)
def test_every_hopper_tile_adds_the_librarys_bits(
    device: Device, hopper: HopperTiles, library: ByLibrary, tile: Tile, kind: Kind
) -> None:
    for outputs, inputs in (*ADDED, *SMALL):
        for rows in (1, 7, 63, 65, 257, 1000):
            assert_they_give_the_same_bits(
                device, kind, lambda shape: hopper.kernel(tile, shape), library.kernel, rows, outputs, inputs
            )


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", SUMMED)
@pytest.mark.parametrize("tile", SPLIT_TILES, ids=lambda tile: tile.name)
def test_blocks_that_share_k_add_the_bits_of_one_that_has_it_all(
    device: Device, hopper: HopperTiles, tile: SplitTile, kind: Kind
) -> None:
    split, whole = SplitTiles(device, [kind]), TILES[kind][-1]
    suited = [sizes for sizes in (*ADDED, (48, 4104), (8, 1000)) if tile.suits(*sizes)]
    assert suited
    for outputs, inputs in suited:
        for rows in (1, 9, 16, 33, 65, 130, 200, 257):
            assert_they_give_the_same_bits(
                device, kind, lambda shape: split.kernel(tile, shape),
                lambda shape: hopper.kernel(whole, shape), rows, outputs, inputs,
            )  # fmt: skip


@BOTH_ELEMENTS
def test_many_inputs_are_two_sums_of_which_the_second_is_added_last(
    device: Device, hopper: HopperTiles, library: ByLibrary
) -> None:
    """Numbers between which the order of additions makes all the difference."""
    outputs, inputs = 64, 4864
    first = first_sum(outputs, inputs)
    assert inputs // 2 == first
    values = np.zeros((1, inputs), dtype=np.float32)
    values[0, [0, first - 1, first, inputs - 1]] = 1.0
    weights = np.zeros((outputs, inputs), dtype=np.float32)
    weights[:, [0, first - 1, inputs - 1]], weights[:, first] = 2**-12, 2**-10
    before = np.full((1, outputs), 8192.0, dtype=np.float32)  # neighbours are 2^-10 apart
    sums = np.float32(2**-11), np.float32(2**-10 + 2**-12)
    expected = before[0, 0] + sums[0] + sums[1]  # the first changes nothing
    assert expected == 8192 + 2**-10
    assert expected != before[0, 0] + (sums[0] + sums[1])
    assert expected != before[0, 0] + sums[1] + sums[0]
    x, weight = elements(device, values), matrix(device, weights)
    shape, split = Shape(1, outputs, inputs, Kind.RESIDUAL, device.element.format), SplitTiles(device, SUMMED)
    ways = {str(tile): hopper.kernel(tile, shape) for tile in TILES[Kind.RESIDUAL]}
    ways |= {str(tile): split.kernel(tile, shape) for tile in SPLIT_TILES if tile.suits(outputs, inputs)}
    ways["library"] = library.kernel(shape)
    for name, way in ways.items():
        y = followed_by_poison(device, before, buffer)
        way(x, weight, y)
        np.testing.assert_array_equal(fetched(device, y, 1), expected, err_msg=name)


@BOTH_ELEMENTS
def test_a_launch_that_waits_for_the_one_before_sees_its_sums(device: Device, hopper: HopperTiles) -> None:
    rows, outputs, inputs = 64, 896, 4864
    before, exact, x, weight = residual_operands(device, rows, outputs, inputs)
    split, times = SplitTiles(device, SUMMED), 30
    for tile in split_tiles(rows, outputs, inputs):
        shape = Shape(rows, outputs, inputs, Kind.RESIDUAL, device.element.format)
        way, y = split.kernel(tile, shape), buffer(device, before)
        for _ in range(times):
            way(x, weight, y)
        wanted = before + times * (exact - before)
        assert nmse(fetched(device, y), wanted) < 1e-10


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", [Kind.RESIDUAL, Kind.ADDEND, Kind.SWIGLU], ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows_whatever_becomes_of_it(
    device: Device, products: Products, kind: Kind
) -> None:
    most = 4096
    for outputs, inputs in ADDED if kind in SUMMED else ((4864, 896), (520, 72)):
        product = products.of(kind, outputs, inputs)
        values, weights = operands(device.element, most, outputs * (1 + (kind is Kind.SWIGLU)), inputs)
        before = np.random.default_rng(0).standard_normal((most, outputs)).astype(np.float32)
        x, weight = elements(device, values), matrix(device, weights)
        y = memory = room(device, (most, outputs), FLOAT)
        any_x = room(device, (most, inputs), ELEMENT)
        if kind is Kind.SWIGLU:
            y = replace(memory, dtype=ELEMENT)
        expected = None
        for rows in (most, 1, 2, 5, 9, 24, 63, 65, 200, 256, 300, 700, 1024, 1500):
            product.tune(any_x, [weight], y, rows, lambda: None)
            device.copy_in(memory.address, before)
            device.synchronize()
            product(x, weight, y, rows)
            result = fetched(device, y, rows)
            expected = result if expected is None else expected
            np.testing.assert_array_equal(result, expected[:rows], err_msg=f"{rows} {outputs} {inputs}")
        assert expected is not None
        assert np.isfinite(expected).all()
        for held in (x, any_x, weight, y):
            device.free(held.address)


@BOTH_ELEMENTS
def test_many_rows_are_computed_as_was_fastest_at_the_nearest_size_tried(
    device: Device, products: Products
) -> None:
    outputs, inputs = 896, 896
    product = products.of(Kind.PLAIN, outputs, inputs)
    values, weights = operands(device.element, 4096, outputs, inputs)
    x, weight, y = elements(device, values), matrix(device, weights), room(device, (4096, outputs), ELEMENT)
    product.tune(room(device, (4096, inputs), ELEMENT), [weight], y, 4096, lambda: None)
    for rows in (1025, 3000, 4096):
        device.fill(y.address, 0xFF, y.bytes)
        product(x, weight, y, rows)
        result = fetched(device, y, rows)
        assert nmse(result, product_of(values[:rows], weights)) <= ROUNDED_ONCE[device.element]


def test_a_fault_of_one_percent_would_be_seen() -> None:
    x, weight = operands(Element.F16, 65, 515, 72)
    expected = product_of(x, weight)
    broken = expected.copy()
    broken[0, 0] = np.nan
    for wrong in (expected * 1.01, broken):
        assert nmse(wrong, expected) > max(ROUNDED_ONCE.values())
