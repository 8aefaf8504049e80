"""The definition of packed weights' elements, held against what `gguf` makes of the same blocks in float."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format
from tests.support.blocks import random_blocks
from tests.support.elements import from_words
from tests.support.k_quants import quantised
from tests.support.packed_elements import as_packed_words, elements_of, has_its_own

Kind = GGMLQuantizationType
OWN = [Kind[kept.name] for kept in Format if kept.packed and has_its_own(Kind[kept.name], Element.F16)]


def test_types_with_quantised_scales_or_minima_have_elements_of_their_own_in_half() -> None:
    assert {kind.name for kind in OWN} == {"Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    assert not any(has_its_own(kind, Element.BF16) for kind in OWN)


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.name)
def test_an_element_is_within_its_scale_and_minimum_s_rounding(kind: Kind) -> None:
    """Three roundings to half, each by 2^-11 at most, of what is no larger than a group's largest part."""
    blocks = random_blocks(kind, 500)
    exact = dequantize(blocks, kind).astype(np.float64)
    made = from_words(as_packed_words(blocks, kind, Element.F16), Element.F16).astype(np.float64)
    assert np.isfinite(made).all()
    assert ((made - exact) ** 2).sum() < 2e-7 * (exact**2).sum()


def test_an_element_is_rounded_once() -> None:
    """15 times a scale of 1 + 2^-10, less a minimum of 1 + 2^-10: products by themselves would be rounded."""
    block = np.zeros((1, 20), dtype=np.uint8)  # Q4_1: d, m, nibbles
    block[0, :4] = np.array([1 + 2**-10, -(1 + 2**-10)], dtype="<f2").view(np.uint8)
    block[0, 4:] = 0xFF
    assert (elements_of(block, Kind.Q4_1) == np.float16(14 * (1 + 2**-10))).all()


@pytest.mark.parametrize(("kind", "least", "most"), [(Kind.Q4_K, 3e-3, 1e-2), (Kind.Q6_K, 1e-4, 6e-4)])
def test_numbers_become_blocks_of_k_types(kind: Kind, least: float, most: float) -> None:
    """Of Gaussian numbers, with the squared error that these types are known for."""
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32) * 0.02
    error = ((dequantize(quantised(values, kind), kind) - values) ** 2).sum() / (values**2).sum()
    assert least < error < most
