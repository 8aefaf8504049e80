"""`few_rows.cu`, compiled for the host, as on other cards than Hopper, by the tests that hold it on a GPU."""

from pathlib import Path
from typing import Any

import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Buffer, Matrix
from nightmill.worker.runners.gpu.products.elements import few_rows, mma_gemm
from nightmill.worker.runners.gpu.products.elements.few_rows import FewRows
from nightmill.worker.runners.gpu.products.elements.mma_gemm import MmaTiles
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES
from nightmill.worker.runners.gpu.rows import activate, norms, rotation
from nightmill.worker.runners.gpu.shapes import Kind, Shape
from tests.gpu import test_few_rows as on_gpu
from tests.support.specs import dense_spec
from tests.unit.runners.host_kernels import HostDevice, HostModule
from tests.unit.runners.host_launchers import launch_on_host

pytestmark = pytest.mark.heavy

MODELS: dict[str, dict[str, Any]] = {
    "halves": {"heads": 3, "kv_heads": 1, "width": 96, "ffn_width": 4128},
    "pairs": {
        "heads": 1, "kv_heads": 1, "head_dim": 128, "width": 288, "ffn_width": 64, "bias": False,
        "style": RopeStyle.PAIRS,
    },
}  # fmt: skip
"""Inputs of `down` that Hopper would sum in two parts; rows of two parts for the sums of their squares."""


class Tiles:
    """Products by tiles, which all give the same bits, in place of the library."""

    def __init__(self, device: Any) -> None:
        self._tiles = MmaTiles(device, alone=True)

    def __call__(self, x: Buffer, weight: Matrix, y: Buffer, rows: int, kind: Kind = Kind.PLAIN) -> None:
        """Queue it."""
        shape = Shape(rows, weight.rows, weight.columns, kind, weight.format)
        self._tiles.kernel(MMA_TILES[-1], shape)(x, weight, y)


@pytest.fixture(params=MODELS)
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> on_gpu.Bench:
    launch_on_host(monkeypatch, tmp_path, "warps", (activate, norms, rotation))
    for module in (few_rows, mma_gemm):
        monkeypatch.setattr(module, "Module", HostModule)
    monkeypatch.setattr(on_gpu, "ByLibrary", Tiles)
    monkeypatch.setattr(on_gpu, "CONTEXT", 100)
    device: Any = HostDevice(Element.BF16 if request.param == "pairs" else Element.F16)
    return on_gpu.Bench(device, dense_spec(**MODELS[request.param]))


@pytest.mark.parametrize("tokens", [1, 3])
def test_each_kernel_has_the_bits_of_those_it_stands_for(bench: on_gpu.Bench, tokens: int) -> None:
    few = FewRows(bench.device, bench.spec.layers[0], bench.spec.width, bench.rotation.table)
    assert few.adds_down
    on_gpu.test_norm_qkv_bias_rotation_and_cache_write(bench, few, tokens)
    on_gpu.test_products_added_to_the_residual_stream(bench, few, tokens)
    on_gpu.test_norm_gate_up_and_swiglu(bench, few, tokens)
