"""What the benchmark of packed products is asked for."""

import argparse

import pytest

from benchmarks.products import shape_of
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.products.shapes import Kind


def test_a_product_has_a_name_a_type_and_numbers_of_rows() -> None:
    name, shape, rows = shape_of("down:Q4_K:1,64")
    assert (name, shape.outputs, shape.inputs, rows) == ("down", 3584, 18_944, [1, 64])
    assert (shape.kind, shape.format) == (Kind.RESIDUAL, Format.Q4_K)
    assert shape_of("gate_up-0.5B:Q8_0:8")[1].outputs == 4864


@pytest.mark.parametrize("text", ["down", "down:Q4_K", "down:Q9_K:1", "up:Q4_K:1", "down:Q4_K:one"])
def test_what_else_is_said_is_answered_with_how_to_say_it(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not NAME:TYPE:ROWS, as down:Q4_K:1,64"):
        shape_of(text)
