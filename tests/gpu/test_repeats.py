"""The same launch gives the same bits a thousand times: a race shows in a few launches of many.

A relay that let packets be overwritten while they were read gave wrong sums in one launch of six where blocks
had several tiles, and in one of thousands elsewhere; each of these shapes is one of a real model.
"""

import pytest

from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, Buffer, Format
from nightmill.worker.runners.gpu.shapes import Kind, Shape, padded_rows
from tests.gpu.product_trials import GUARD, Trial, group_of, sources_of
from tests.support.real_products import real_products

LAUNCHES = 1_000


@pytest.mark.parametrize("rows", [64, 200])
@pytest.mark.parametrize("kept", ["Q5_0", "Q8_0", "Q4_K", "Q6_K"])
def test_relays_give_the_same_bits_a_thousand_times(kept: str, rows: int, device: Device) -> None:
    product = next(
        one
        for one in real_products()
        if group_of(one) == ("residual", kept) and one.outputs >= 3_584 and one.inputs >= 4_096
    )
    compile_all(sources_of(device, Kind.RESIDUAL, [(kept,)]), device.architecture)
    trial = Trial(device, Kind.RESIDUAL, [product])
    trial.take([Format[kept]], [product])
    assert trial._products is not None
    taken: list[int] = []

    def room(size: int) -> int:
        taken.append(device.allocate(size))
        return taken[-1]

    try:
        weight = trial._weight(product, trial._plain(product, room), taken)
        size = rows * product.outputs * trial._dtype.itemsize
        reference = room(size)
        x = room((trial._most_rows + 8) * product.inputs * ELEMENT.itemsize)
        y = room(2 * GUARD + trial._most_rows * product.outputs * trial._dtype.itemsize)
        shape = Shape(padded_rows(rows), product.outputs, product.inputs, Kind.RESIDUAL, product.format)
        candidates = trial._products._candidates(shape)
        relays = [one for one in candidates if one.name.endswith("relay")]
        plain = next(one for one in candidates if one not in relays)
        assert relays
        trial._run(plain.kernel(shape), product, rows, weight, x, y)
        trial._compared.copy(reference, y + GUARD, size)
        inputs = Buffer(x, (padded_rows(rows), product.inputs), ELEMENT)
        results = trial._results(y + GUARD, product)
        for relay in relays:
            way, wrong = relay.kernel(shape), 0
            for _ in range(LAUNCHES):
                trial._begin(y + GUARD, size)
                way(inputs, weight, results)
                wrong += trial._compared.other_bits(y + GUARD, reference, size)[0] > 0
            assert wrong == 0, f"{product}, {rows} rows, {relay.name}"
    finally:
        for address in taken:
            device.free(address)
        trial._products.close()
