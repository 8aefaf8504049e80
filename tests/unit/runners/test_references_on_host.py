"""The readable kernels, compiled for the host, against float64 and the definition of the draw.

`tests/gpu/test_reference_kernels.py` holds the fast kernels against them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import FLOAT, Format, Matrix
from nightmill.worker.runners.gpu.weights.repacker import Repacker
from tests.gpu import test_reference_kernels as on_gpu
from tests.gpu.oracles import nmse
from tests.support.blocks import random_blocks
from tests.support.elements import from_words, rounded
from tests.support.operands import elements, fetched, matrix, poisoned
from tests.support.packed_elements import as_packed_words
from tests.support.reference_kernels import ReferenceProducts
from tests.unit.runners.host_kernels import HostDevice, Staged
from tests.unit.runners.host_launchers import run_references_on_host

pytestmark = pytest.mark.heavy


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    return run_references_on_host(monkeypatch, tmp_path)


@pytest.fixture(params=Element, ids=lambda element: element.value)
def device(request: pytest.FixtureRequest) -> Any:
    return HostDevice(request.param)


def test_products_norms_and_rotation_are_exact(launched: set[str], device: Any) -> None:
    on_gpu.products_are_exact(device, 3, 130, 72)
    on_gpu.fp8_products_are_exact(device, 3, 130, 72)
    on_gpu.norms_are_exact(device, 33, 72)
    on_gpu.heads_are_exact(device, 3)
    assert {name.removesuffix("_reference") for name in launched} == {
        "product", "residual", "swiglu", "fp8", "rms_norm", "rope",
    }  # fmt: skip


def test_fast_kernels_of_rows_are_held_against_them(launched: set[str]) -> None:
    device: Any = HostDevice()
    on_gpu.test_rms_norms_are_those_of_the_reference(device)
    on_gpu.test_heads_are_those_of_the_reference(device, RopeStyle.HALVES)
    assert launched >= {"rms_norm_reference", "rope_reference", "qkv_rope_write"}


def test_draws_are_those_of_the_definition(launched: set[str]) -> None:
    device: Any = HostDevice()
    on_gpu.draws_are_the_definition_s(device, 33, 203)
    assert launched == {"sample_reference"}


@pytest.mark.parametrize("kept", [Format.Q4_K, Format.Q8_0], ids=lambda kept: kept.name)
def test_packed_weights_are_those_of_the_file(launched: set[str], device: Any, kept: Format) -> None:
    """With the bits of the product over the dequantised matrix."""
    rows, outputs, inputs = 3, 13, 512
    kind, rng = GGMLQuantizationType[kept.name], np.random.default_rng(1)
    blocks = random_blocks(kind, outputs * inputs // GGML_QUANT_SIZES[kind][0])
    exact = from_words(as_packed_words(blocks, kind, device.element).reshape(outputs, inputs), device.element)
    weight = Matrix(device.allocate(kept.bytes(outputs, inputs)), outputs, inputs, kept)
    staged: Any = Staged(device)
    repacker = Repacker(device, staged)
    repacker.clear(weight, outputs)
    repacker.load(blocks.reshape(-1), weight, 0)
    values = rounded(rng.standard_normal((rows, inputs)), device.element)
    x, reference = elements(device, values), ReferenceProducts(device)
    found = [poisoned(device, (rows, outputs), FLOAT) for _ in range(2)]
    reference(x, weight, found[0], rows)
    reference(x, matrix(device, exact), found[1], rows)
    packed, plain = (fetched(device, one) for one in found)
    np.testing.assert_array_equal(packed, plain)
    assert nmse(packed, values.astype(np.float64) @ exact.astype(np.float64).T) < on_gpu.FLOATS
    assert launched == {f"repack_{kept.name}", "packed_reference", "product_reference"}
