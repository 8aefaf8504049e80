"""Products by mma.sync on the GPU: to the bit those of other kernels, by every tile, with poison around."""

from dataclasses import replace

import numpy as np
import pytest

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Format
from nightmill.worker.runners.gpu.products.elements import mma_gemm
from nightmill.worker.runners.gpu.products.elements.hopper_gemm import TILES, HopperTiles
from nightmill.worker.runners.gpu.products.elements.mma_gemm import MmaTiles
from nightmill.worker.runners.gpu.products.fp8.mma_fp8 import MmaFp8
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES, MmaTile
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.shapes import GATED, SUMMED, Candidate, Kernel, Kind, Shape, padded_rows
from nightmill.worker.runners.reference import ops
from tests.gpu.test_fp8 import Rows
from tests.gpu.test_gemm import (
    ADDED,
    assert_they_give_the_same_bits,
    followed_by_poison,
    operands,
    product_of,
)
from tests.support.comparing import nmse
from tests.support.elements import BOTH_ELEMENTS, ROUNDED_ONCE, rounded
from tests.support.needs import Need, missing
from tests.support.operands import (
    ByLibrary,
    all_products,
    buffer,
    elements,
    fetched,
    fp8_room,
    matrix,
    poisoned,
    room,
)

ROWS = (1, 15, 17, 63, 65, 257, 1000)
SIZES = ((1152, 896), (896, 4864), (4864, 896), (520, 72), (32_000, 64))
"""Outputs and inputs."""
EACH_TILE = pytest.mark.parametrize("tile", MMA_TILES, ids=lambda tile: tile.name)


@BOTH_ELEMENTS
@EACH_TILE
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.FLOAT], ids=str)
def test_each_tile_has_the_bits_of_the_reference(device: Device, tile: MmaTile, kind: Kind) -> None:
    """Which are right; and on Hopper those of wgmma."""
    tiles = MmaTiles(device, alone=True)
    hopper = HopperTiles(device, [Kind.PLAIN]) if device.hopper else None
    for outputs, inputs in SIZES:
        for rows in ROWS if outputs < 10_000 else (1, 130):
            values, weights = operands(device.element, rows, outputs, inputs)
            x, weight = followed_by_poison(device, values), matrix(device, weights)
            shape = Shape(rows, outputs, inputs, kind, device.element.format)
            reference = tiles.reference(shape)
            assert reference is not None
            ways = [tiles.kernel(tile, shape), reference.kernel(shape)]
            if hopper is not None and kind is Kind.PLAIN:
                ways.append(hopper.kernel(TILES[kind][0], shape))
            floats = kind is Kind.FLOAT
            found = []
            for way in ways:
                y = poisoned(device, (rows + 1, outputs), FLOAT if floats else ELEMENT)
                way(x, weight, y)
                found.append(fetched(device, y))
                device.free(y.address)
            for other in found[1:]:
                np.testing.assert_array_equal(found[0], other, err_msg=f"{rows} {outputs} {inputs}")
            limit = 1e-10 if floats else ROUNDED_ONCE[device.element]
            assert nmse(found[0][:rows], product_of(values, weights)) <= limit
            assert np.isnan(found[0][rows]).all(), "wrote past its rows"
            for held in (x, weight):
                device.free(held.address)


@BOTH_ELEMENTS
@EACH_TILE
@pytest.mark.parametrize("kind", SUMMED)
def test_each_tile_adds_the_bits_of_the_library(device: Device, tile: MmaTile, kind: Kind) -> None:
    """In two sums where there are two."""
    tiles, library = MmaTiles(device, alone=True), ByLibrary(device)
    for outputs, inputs in ADDED:
        for rows in (1, 17, 65, 257):
            assert_they_give_the_same_bits(
                device, kind, lambda shape: tiles.kernel(tile, shape), library.kernel, rows, outputs, inputs
            )
    library.close()


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", [Kind.SWIGLU, Kind.GEGLU])
@pytest.mark.parametrize(
    "tile", [one for one in MMA_TILES if one.takes(Kind.SWIGLU)], ids=lambda one: one.name
)
def test_an_activation_in_a_tile_gives_the_bits_of_two_kernels(
    device: Device, tile: MmaTile, kind: Kind
) -> None:
    tiles, activate = MmaTiles(device, alone=True), Activate(device)
    for ffn, inputs in ((4864, 896), (520, 72)):
        for rows in (1, 65, 300):
            values, weights = operands(device.element, rows, 2 * ffn, inputs)
            x, weight = elements(device, values), matrix(device, weights)
            gate_up = room(device, (rows, 2 * ffn), ELEMENT)
            fused, plain = (poisoned(device, (rows + 1, ffn), ELEMENT) for _ in range(2))
            shape = Shape(rows, 2 * ffn, inputs, Kind.PLAIN, device.element.format)
            tiles.kernel(tile, shape)(x, weight, gate_up)
            activate(gate_up, plain, rows, GATED[kind])
            tiles.kernel(tile, replace(shape, outputs=ffn, kind=kind))(x, weight, fused)
            result, expected = fetched(device, fused), fetched(device, plain)
            np.testing.assert_array_equal(result[:rows], expected[:rows], err_msg=f"{rows} {ffn}")
            assert np.isnan(result[rows]).all(), "wrote past its rows"


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SWIGLU, Kind.GEGLU, *SUMMED], ids=str)
def test_tiles_of_fp8_are_exact_and_give_the_same_bits(device: Device, kind: Kind) -> None:
    if not device.fp8:
        missing(Need.FP8)
    products = MmaFp8(device, [kind], fp8_room(device, 0, 0))
    rng, gated = np.random.default_rng(1), kind.activation is not None
    for outputs, inputs in ((1152, 896), (520, 80), (264, 18_944)):
        weight = Rows(device, 2 * outputs if gated else outputs, inputs, rng)
        for rows in (1, 7, 63, 65, 257):
            x = Rows(device, rows, inputs, rng)
            exact = x.exact @ weight.exact.T
            before = rng.standard_normal((rows, outputs)).astype(np.float32)
            if kind is Kind.RESIDUAL:
                exact += before
            if gated:
                activation = ops.geglu if kind is Kind.GEGLU else ops.swiglu
                exact = activation(rounded(exact, device.element).astype(np.float64))
            first = None
            for tile in MMA_TILES:
                if not tile.takes(kind):
                    continue
                held = np.full((rows + 1, outputs), np.nan, dtype=np.float32)
                if kind is Kind.RESIDUAL:
                    held[:rows] = before
                floats = kind in SUMMED
                y = buffer(device, held) if floats else poisoned(device, held.shape, ELEMENT)
                products.kernel(tile, Shape(rows, outputs, inputs, kind, Format.FP8))(
                    x.buffer, weight.matrix, y
                )
                result, case = fetched(device, y), f"{tile}, {rows} rows of {inputs}, {outputs} outputs"
                assert np.isnan(result[rows]).all(), f"{case}: wrote past its rows"
                error = nmse(result[:rows], exact)
                assert error <= (1e-6 if floats else 4 * ROUNDED_ONCE[device.element]), f"{case}: {error}"
                first = result if first is None else first
                np.testing.assert_array_equal(result, first, err_msg=case)
                device.free(y.address)


@BOTH_ELEMENTS
def test_what_is_chosen_has_the_references_bits_for_each_number_of_rows(device: Device) -> None:
    """Whatever timing prefers, at sizes that were timed and at others."""
    with all_products(device) as products:
        for kind in (Kind.PLAIN, Kind.FLOAT, Kind.SWIGLU, Kind.RESIDUAL):
            outputs, inputs = (896, 4864) if kind is Kind.RESIDUAL else (4864, 896)
            values, weights = operands(device.element, 2048, outputs * (1 + (kind is Kind.SWIGLU)), inputs)
            held, weight = elements(device, values), matrix(device, weights)
            x = elements(device, values)  # which tuning overwrites
            y = room(device, (2048, outputs), FLOAT)
            if kind in (Kind.PLAIN, Kind.SWIGLU):
                y = replace(y, dtype=ELEMENT)
            product = products.of(kind, outputs, inputs)
            for tuned in (1, 8, 40, 64, 256, 1024, 2048):
                product.tune(x, [weight], y, tuned, lambda: None)
            for rows in (1, 3, 8, 12, 40, 64, 72, 200, 256, 400, 700, 1024, 1500, 2048):
                shape = Shape(rows, outputs, inputs, kind, device.element.format)
                reference = products._reference(shape)
                assert reference is not None
                found = []
                for exact in (False, True):
                    device.fill(y.address, 0x3F, y.bytes)
                    if exact:
                        reference.kernel(shape)(held, weight, y)
                    else:
                        product(held, weight, y, rows)
                    found.append(fetched(device, y, rows))
                np.testing.assert_array_equal(*found, err_msg=f"{kind} {rows}: {product.tuned}")
            for address in (held.address, weight.address, x.address, y.address):
                device.free(address)


def test_a_kernel_with_other_bits_is_left_out_and_not_trusted(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose sums are cut in two where they should not be."""
    outputs, inputs = 4096, 1024
    with all_products(device) as products:
        shape = Shape(64, outputs, inputs, Kind.ADDEND, device.element.format)
        wrong = MmaTiles(device, alone=True)
        wrong._two_sums = True

        def cut(of: Shape) -> Kernel:
            with monkeypatch.context() as patch:
                patch.setattr(mma_gemm, "first_sum", lambda outputs, inputs: 512)
                return wrong.kernel(MMA_TILES[2], of)

        odd = Candidate("cut", cut, algorithm=b"cut")
        values, weights = operands(device.element, 64, outputs, inputs)
        x, weight, y = elements(device, values), matrix(device, weights), room(device, (64, outputs), FLOAT)
        every = [odd, *products._candidates(shape)]
        agreed = products._agreement.agreeing(every, shape, x, weight, y)
        assert odd not in agreed and agreed
        assert not products._agreement.trusts(odd, shape)
        assert all(products._agreement.trusts(one, shape) for one in agreed)


@pytest.mark.parametrize("key", ["rtx3090", "a100", "rtx4090", "rtx5090"])
def test_the_gpu_runs_what_a_pretended_card_would(key: str) -> None:
    """Code of another compute capability, in the bits of the real one's."""
    outputs, inputs, rows = 896, 512, 70
    found = []
    for card in (None, KNOWN_CARDS[key]):
        with Device(pretended=card) as device, all_products(device) as products:
            values, weights = operands(device.element, rows, outputs, inputs)
            x, weight = followed_by_poison(device, values), matrix(device, weights)
            y = room(device, (padded_rows(rows), outputs), FLOAT)
            shape = Shape(padded_rows(rows), outputs, inputs, Kind.FLOAT, device.element.format)
            reference = products._reference(shape)
            assert reference is not None
            reference.kernel(shape)(x, weight, y)
            found.append(fetched(device, y, rows))
            assert card is None or (not device.hopper and "pretended on" in device.name)
    np.testing.assert_array_equal(*found)
