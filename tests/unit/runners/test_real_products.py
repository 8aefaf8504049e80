"""What would be launched for the products of real models, in all formats that their files may have."""

from collections.abc import Iterator

import pytest

from nightmill.worker.runners.gpu.activations import LOGIT_ROWS
from nightmill.worker.runners.gpu.device.operands import ELEMENT, Format
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PACKED_TILES
from nightmill.worker.runners.gpu.products.packed.unpack import Unpacked
from nightmill.worker.runners.gpu.shapes import MANY_ROWS, Kind, padded_rows
from tests.support.real_products import (
    HEAD_ROWS,
    IN_FILE,
    RealProduct,
    products_in,
    real_products,
    rows_of,
    typed_specs,
)
from tests.unit.runners.recorded_products import (
    RecordedLaunchers,
    check_launches,
    operands_of,
    recorded_launchers,
)

FEW_ROWS = 64  # up to which a product has no way by elements if it has another
KINDS = tuple(kind.value for kind in PACKED_TILES)
ROOM = 64 << 20


@pytest.fixture(scope="module")
def launchers() -> Iterator[RecordedLaunchers]:
    with recorded_launchers() as launchers:
        yield launchers


def products(kind: str, *, mixed: bool) -> list[RealProduct]:
    """Those of packed formats; `mixed`: of several."""
    found = [one for one in real_products() if one.kind == kind and (len(one.parts) > 1) == mixed]
    return [one for one in found if all(Format[part.format].packed for part in one.parts)]


def check(launchers: RecordedLaunchers, product: RealProduct, rows: int) -> None:
    """Launch every candidate for so many rows."""
    x, weight, y, shape = operands_of(product, rows)
    found = launchers.candidates(shape)
    if shape.rows <= FEW_ROWS and Kind(product.kind).activation is None:
        assert found, f"{product}: nothing computes {rows} rows"
    for candidate in found:
        assert candidate.suits(shape), f"{product}: {candidate.name} is not said to suit {rows} rows"
        launchers.launches.clear()
        candidate.kernel(shape)(x, weight, y)
        try:
            check_launches(launchers.launches, x, weight, y, shape)
        except AssertionError as error:
            error.add_note(f"{product}, {rows} rows, {candidate.name}: {launchers.launches}")
            raise


@pytest.mark.parametrize("kind", KINDS)
def test_launches_cover_each_result_once_and_read_the_weights_alone(
    launchers: RecordedLaunchers, kind: str
) -> None:
    found = products(kind, mixed=False)
    assert len(found) > 50
    for product in found:
        for rows in rows_of(product):
            check(launchers, product, rows)


def test_queries_keys_and_values_in_several_formats(launchers: RecordedLaunchers) -> None:
    found = products(Kind.PLAIN.value, mixed=True)
    assert len(found) > 100 and any(len(product.parts) == 3 for product in found)
    for product in found:
        for rows in rows_of(product):
            check(launchers, product, rows)


@pytest.mark.parametrize("kind", [Kind.SWIGLU, Kind.GEGLU], ids=lambda kind: kind.value)
def test_gate_and_up_in_two_formats(launchers: RecordedLaunchers, kind: Kind) -> None:
    found = products(kind.value, mixed=True)
    assert found
    for product in found:
        for rows in rows_of(product):
            check(launchers, product, rows)


@pytest.mark.parametrize("size", [ROOM, 16 << 20])
def test_heads_go_through_elements_in_pieces_that_cover_them(launchers: RecordedLaunchers, size: int) -> None:
    heads = [one for one in real_products() if one.kind == Kind.FLOAT.value]
    assert len(heads) > 50 and padded_rows(HEAD_ROWS[-1]) == LOGIT_ROWS < MANY_ROWS
    for product in heads:
        _, _, _, shape = operands_of(product, HEAD_ROWS[-1])
        ways = launchers.by_elements(shape, size)
        assert ways or not shape.format.packed
        for pieces in ways:
            assert sum(piece.outputs for piece in pieces) == product.outputs
            assert all(piece.outputs * piece.inputs * ELEMENT.itemsize <= size for piece in pieces)
            assert all(piece.outputs % 8 == 0 for piece in pieces)
            assert len(pieces) == 1 or {piece.pitch for piece in pieces} == {product.outputs}


def test_the_room_for_elements_that_is_planned_takes_every_matrix_of_a_model(
    launchers: RecordedLaunchers,
) -> None:
    planned = {
        (size, product)
        for spec in typed_specs()
        for size in [Unpacked.workspace(spec, IN_FILE)]
        for product in products_in(spec)
        if all(Format[part.format].packed for part in product.parts)
    }
    assert len(planned) > 1000
    for size, product in planned:
        _, _, _, shape = operands_of(product, HEAD_ROWS[-1])
        (pieces,) = launchers.by_elements(shape, size)
        assert len(pieces) == 1 or product.kind == Kind.FLOAT.value, f"{product} in {size:,} bytes"
