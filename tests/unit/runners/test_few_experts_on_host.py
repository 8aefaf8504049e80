"""Kernels of experts for a few tokens on the host, against those for any number of them, to the bit."""

from pathlib import Path
from typing import Any

import pytest

from nightmill.worker.model.spec import Activation, Experts, RouterScores
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.experts.tiles import ExpertTile
from nightmill.worker.runners.gpu.products.elements.mma_gemm import MmaTiles
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES
from nightmill.worker.runners.gpu.shapes import Kind, Shape
from tests.gpu.few_trials import FewTrial, few_agree, few_strange
from tests.unit.runners.host_kernels import HostDevice, run_few_experts_on_host

pytestmark = pytest.mark.heavy

SMALL = Experts(count=4, used=2, width=96, normalise=True)
OTHER = Experts(
    count=40, used=3, width=96, activation=Activation.CLAMPED_SWIGLU, bias=True, router_bias=True,
    scores=RouterScores.SIGMOID, selection_bias=True, expert_scales=("gate", "up", "down"), fused=True,
    groups=4, groups_used=2, scale=2.5,
)  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    return run_few_experts_on_host(monkeypatch, tmp_path)


def few_trial(element: Element, experts: Experts, width: int, kept: Format, multiprocessors: int) -> FewTrial:
    device: Any = HostDevice(element)
    device.hopper, device.compute_capability, device.multiprocessors = True, (9, 0), multiprocessors
    products = MmaTiles(device, alone=True)

    def product(x: Buffer, router: Matrix, y: Buffer, rows: int) -> None:
        products.kernel(MMA_TILES[4], Shape(rows, router.rows, router.columns, Kind.FLOAT))(x, router, y)

    return FewTrial(device, experts, width, kept, product, (ExpertTile(16),))


def test_a_few_tokens_have_the_bits_of_any_number(launched: set[str]) -> None:
    """Warps have several panels each, of several experts; inputs that fill no packet and no chunk."""
    few_agree(few_trial(Element.F16, SMALL, 160, Format.MXFP4, 3), (1, 5))
    assert launched >= {"few_router", "few_gate_up", "few_down", "combine_1", "route_few", "experts_two_1"}


def test_what_routers_and_experts_have_beside(launched: set[str]) -> None:
    few_strange(few_trial(Element.BF16, OTHER, 64, Format.Q8_0, 3), 3)


FORMATS = [one for one in Format if one.packed and one is not Format.MXFP4]


@pytest.mark.parametrize("kept", [pytest.param(one, marks=pytest.mark.slow) for one in FORMATS], ids=str)
@pytest.mark.parametrize("element", Element)
def test_every_format(launched: set[str], kept: Format, element: Element) -> None:
    step = 256 if kept.step == 256 else 160
    experts = Experts(count=3, used=2, width=step)
    few_agree(few_trial(element, experts, 2 * step, kept, 5), (1, 3))
