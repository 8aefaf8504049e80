"""Kernels of experts for a few tokens on the host, against those for any number of them, to the bit."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightmill.worker.model.spec import Activation, Experts, RouterScores
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import for_element, source_of
from nightmill.worker.runners.gpu.experts.few import FewMemory
from nightmill.worker.runners.gpu.experts.tiles import ExpertTile
from nightmill.worker.runners.gpu.products.elements.mma_gemm import MmaTiles
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES
from nightmill.worker.runners.gpu.shapes import Kind, Shape
from tests.gpu.few_trials import FewTrial, few_agree, few_strange
from tests.unit.runners.host_kernels import HostDevice, holds_on_host
from tests.unit.runners.host_launchers import run_few_experts_on_host

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


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("kept", [Format.Q4_K, Format.Q2_K, Format.MXFP4], ids=lambda one: one.name)
def test_blocks_are_given_what_kernels_take(kept: Format, element: Element) -> None:
    """One more stage than the host says would not be in its memory."""
    claims = []
    for warps, stages, left, rows, inputs in (
        (12, 8, 3072, 1, 2048),
        (16, 3, 512, 8, 768),
        (7, 2, 96, 3, 288),
    ):
        memory = FewMemory(kept, element, warps, left, rows, inputs, stages)
        claims.append(f"Memory({warps}, {stages}, {left}, {rows}, {inputs}).bytes == {memory.bytes}")
    source = for_element(source_of("few_experts", f"-DFORMAT={kept.name}"), element)
    holds_on_host(source, [*claims, "left_of_gate_up(12) == 6 * 2 * 32 * 2 * 4", "left_of_down(8, 2) == 512"])
    with pytest.raises(subprocess.CalledProcessError):
        holds_on_host(source, [f"{claims[0]} + 16"])


def test_stages_are_as_many_as_fit_and_as_are_used() -> None:
    device: Any = HostDevice(Element.F16)
    device.compute_capability = (9, 0)
    given = {"warps": 16, "left": 512, "rows": 8, "inputs": 768}
    used = FewMemory.of(device, Format.Q6_K, tasks=1, **given)
    assert used is not None and used.stages == 3
    many = FewMemory.of(device, Format.Q6_K, tasks=5, **given)
    assert many is not None and many.stages == 7
    assert replace(many, stages=8).bytes > (227 - 6 << 10) >= many.bytes
    assert FewMemory.of(device, Format.Q6_K, tasks=5, **given | {"rows": 128}) is None


FORMATS = [one for one in Format if one.packed and one is not Format.MXFP4]


@pytest.mark.parametrize("kept", [pytest.param(one, marks=pytest.mark.slow) for one in FORMATS], ids=str)
@pytest.mark.parametrize("element", Element)
def test_every_format(launched: set[str], kept: Format, element: Element) -> None:
    step = 256 if kept.step == 256 else 160
    experts = Experts(count=3, used=2, width=step)
    few_agree(few_trial(element, experts, 2 * step, kept, 5), (1, 3))
