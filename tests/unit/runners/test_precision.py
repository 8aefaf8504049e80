"""What a runner is told of its formats, and how the name of its arithmetic tells them apart."""

from itertools import product

from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.kv_format import KvFormat


def test_every_choice_that_gives_other_bits_has_a_name_of_its_own() -> None:
    """FP8 weights and keys leave the element to the activations, whose type the weights' name holds."""
    kept = (WeightsFormat.ELEMENT, WeightsFormat.FILE, WeightsFormat.FP8)
    choices = [Precision(*one) for one in product(Element, kept, KvFormat)]
    assert len({(one.weights_name, one.kv_name) for one in choices}) == len(choices)


def test_formats_that_products_are_rounded_by_are_in_the_name() -> None:
    chosen = set(WeightsFormat) - {WeightsFormat.AUTO}
    names = {one: Precision(weights=one).weights_name for one in chosen}
    assert names == {
        WeightsFormat.ELEMENT: "f16", WeightsFormat.FILE: "file in f16", WeightsFormat.FP8: "fp8 in f16",
    }  # fmt: skip


def test_what_is_not_quantised_is_called_as_ever() -> None:
    assert (HALF.weights_name, HALF.kv_name) == ("f16", "f16")
    found = Precision(Element.BF16, WeightsFormat.FILE, KvFormat.FP8)
    assert (found.weights_name, found.kv_name) == ("file in bf16", "fp8")
