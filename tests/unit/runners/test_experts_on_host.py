"""Kernels of mixtures of experts on the host, lane by lane, against the reference runner in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.spec import Experts
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.experts.tiles import ExpertTile, Multiplier
from tests.gpu import test_experts_kernels as on_gpu
from tests.gpu.expert_trials import KINDS, ExpertTrial, assert_same, results
from tests.unit.runners.host_kernels import HostDevice, run_experts_on_host


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    return run_experts_on_host(monkeypatch, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_computed(launched: set[str], kind: str) -> None:
    device: Any = HostDevice(Element.F16)
    trial = ExpertTrial(device, KINDS[kind])
    trial.check(*trial.inputs(9), padding=np.arange(9) % 4 == 3)
    trial.check(*trial.inputs(1))
    gated = "two" if KINDS[kind].gated else "one"
    assert launched >= {
        "choose",
        "place_tokens",
        "route_few",
        f"experts_{gated}_1",
        "experts_floats_1",
        "combine_1",
    }


@pytest.mark.parametrize(
    "kept", [Format.FP8, Format.Q4_K, Format.Q8_0, Format.MXFP4], ids=lambda one: one.name
)
def test_each_kind_of_format_is_multiplied(launched: set[str], kept: Format) -> None:
    device: Any = HostDevice(Element.F16)
    on_gpu.multiply(device, kept, 3)


def test_what_a_tokens_bits_depend_on(launched: set[str]) -> None:
    """All of a tile's sizes are met: 64, 32 and 16 rows."""
    device: Any = HostDevice(Element.BF16)
    on_gpu.alone(device, KINDS["qwen"], 150)
    on_gpu.strange(device, KINDS["groups, squared"], 20)
    on_gpu.ties(device)
    assert launched >= {f"experts_{name}_{tiles}" for name, tiles in (("two", 4), ("two", 1))}


STAYING = [
    (Format.MXFP4, (8, 32)),
    *(pytest.param(Format.MXFP4, (rows,), marks=pytest.mark.slow) for rows in (16, 64, 128, 256)),
    pytest.param(Format.Q4_K, (8,), marks=pytest.mark.slow),
    pytest.param(Format.Q4_K, (64,), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kept", "sizes"), STAYING)
def test_blocks_that_stay_have_the_bits_of_others(
    launched: set[str], kept: Format, sizes: tuple[int, ...]
) -> None:
    """A multiprocessor's blocks go through several items each."""
    device: Any = HostDevice(Element.F16)
    device.hopper, device.compute_capability, device.multiprocessors = True, (9, 0), 1
    step = 256 if kept is Format.Q4_K else 160
    tiles = [ExpertTile(16), *(ExpertTile(rows, Multiplier.STAYING) for rows in sizes)]
    on_gpu.tiles_agree(device, Experts(count=3, used=2, width=step), 2 * step, kept, 14, tiles)
    assert launched >= {f"packed_{name}_{rows}" for name in ("two", "floats") for rows in sizes}


@pytest.mark.parametrize("kept", [None, Format.FP8])
def test_wgmma_has_the_bits_of_mma(launched: set[str], kept: Format | None) -> None:
    """On Hopper many rows go through other kernels: sums on the host have no order of their own."""
    device: Any = HostDevice(Element.F16)
    device.hopper, device.compute_capability = True, (9, 0)
    trial = ExpertTrial(device, Experts(count=2, used=2, width=32), 64 if kept else 72, kept)
    x, logits = trial.inputs(70)
    found = {rows: trial.check(x[:rows], logits[:rows]) for rows in (3, 20, 40, 70)}
    for rows in (20, 40, 70):
        assert_same(results(found[3], slice(None)), results(found[rows], slice(3)))
    assert launched >= {f"hopper_{name}_{rows}" for name in ("two", "floats") for rows in (32, 64, 128)}
