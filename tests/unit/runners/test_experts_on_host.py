"""Kernels of mixtures of experts on the host, lane by lane, against the reference runner in float64."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.spec import Experts
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.device.sources import for_element
from nightmill.worker.runners.gpu.experts.tiles import (
    GEMM_TILE,
    ExpertTile,
    Multiplier,
    grouped_source,
    tile_for,
    tiles_for,
)
from tests.gpu import test_experts_kernels as on_gpu
from tests.gpu.expert_trials import KINDS, ExpertTrial, assert_same, results
from tests.unit.runners.host_kernels import HostDevice, holds_on_host, run_experts_on_host

pytestmark = pytest.mark.heavy


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


@pytest.mark.parametrize(("width", "pieces"), [(1024, 1), (4096, 2), (4104, 4)])
def test_outputs_are_added_in_rows_of_any_width(launched: set[str], width: int, pieces: int) -> None:
    device: Any = HostDevice(Element.F16)
    on_gpu.outputs_are_added(device, width, 2)
    assert launched == {f"combine_{pieces}"}


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


@pytest.mark.parametrize(
    ("kept", "element"),
    [(Format.Q6_K, Element.F16), (Format.Q6_K, Element.BF16), (Format.MXFP4, Element.F16)],
)
def test_blocks_are_given_what_kernels_take(kept: Format, element: Element) -> None:
    claims = [
        f"Tile<{tile.rows}>::{name} == {value}"
        for tile in tiles_for([kept], hopper=True)
        for name, value in (
            ("BYTES", tile.shared(kept)), ("THREADS", tile.threads(kept)), ("BLOCKS", tile.blocks),
        )
    ]  # fmt: skip
    source = for_element(grouped_source(kept, Multiplier.STAYING), element)
    holds_on_host(source, claims)
    with pytest.raises(subprocess.CalledProcessError):
        holds_on_host(source, [f"{claims[0]} + 16"])


def test_the_tile_is_the_one_that_was_measured_fastest() -> None:
    """With 1, 8, 64, 256 and 2,048 tokens of Qwen3-30B-A3B, a sixteenth of which each expert is sent."""
    rows = (1, 8, 64, 256, 2048)
    packed = tiles_for([Format.Q4_K], hopper=True)
    found = [tile_for(packed, tokens / 16) for tokens in rows]
    assert [one.rows for one in found] == [16, 16, 8, 64, 128]
    assert all(one.by is Multiplier.STAYING for one in found)
    assert tile_for(packed[:1], 512) == packed[0]
    other = tiles_for([Format.F16], hopper=True)
    found = [tile_for(other, tokens / 16) for tokens in rows]
    assert [one.rows for one in found] == [16, 16, 16, 32, 128]
    assert found[-1] == GEMM_TILE
    mixed = tiles_for([Format.F16, Format.Q4_K], hopper=True)
    assert mixed[:-1] == other[:-1]
    assert tile_for(mixed, 128) == ExpertTile(128, Multiplier.WGMMA)


def test_fp8_has_one_files_kernels_on_hopper_whose_sums_are_others() -> None:
    """By those that are fastest with 1, 64, 1,024, 4,096 and 8,192 tokens of Qwen3-30B-A3B."""
    tiles = tiles_for([Format.FP8], hopper=True)
    found = [tile_for(tiles, tokens / 16) for tokens in (1, 64, 1024, 4096, 8192)]
    assert [one.rows for one in found] == [64, 64, 64, 128, 128]
    assert {one.by for one in tiles} == {Multiplier.GEMM}
    assert {one.by for one in tiles_for([Format.FP8], hopper=False)} == {Multiplier.MMA}


@pytest.mark.parametrize("kept", [Format.F16, Format.FP8])
def test_blocks_over_whole_operands_are_given_what_they_take(kept: Format) -> None:
    claims = [
        f"Tile<{tile.rows}>::{name} == {value}"
        for tile in tiles_for([kept], hopper=True)
        if tile.by is Multiplier.GEMM
        for name, value in (
            ("BYTES", tile.shared(kept)), ("THREADS", tile.threads(kept)), ("BLOCKS", tile.blocks),
            ("COLUMNS", tile.columns(kept)),
        )
    ]  # fmt: skip
    assert claims
    holds_on_host(for_element(grouped_source(kept, Multiplier.GEMM), Element.F16), claims)


STAYING = [
    (Format.MXFP4, (8, 16)),
    *(pytest.param(Format.MXFP4, (rows,), marks=pytest.mark.slow) for rows in (64, 128)),
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


def test_a_product_over_elements_has_the_bits_of_others(launched: set[str]) -> None:
    """Experts with several tiles, one, and none; outputs that fill no unit, and several."""
    device: Any = HostDevice(Element.F16)
    device.hopper, device.compute_capability, device.multiprocessors = True, (9, 0), 1
    experts = Experts(count=3, used=1, width=160)
    on_gpu.tiles_agree(device, experts, 320, None, 140, [ExpertTile(64), GEMM_TILE])
    assert launched >= {"gemm_two_128", "gemm_floats_128"}


def test_a_product_over_elements_computes_all_kinds(launched: set[str]) -> None:
    device: Any = HostDevice(Element.BF16)
    device.hopper, device.compute_capability, device.multiprocessors = True, (9, 0), 2
    for kind in ("of the chosen, biases, clamped", "groups, squared", "fused, GELU, scales"):
        trial = ExpertTrial(device, KINDS[kind], among=(GEMM_TILE,))
        trial.check(*trial.inputs(9), padding=np.arange(9) % 4 == 3)
    assert launched >= {"gemm_two_128", "gemm_one_128", "gemm_floats_128"}


def test_fp8_is_multiplied_as_it_is(launched: set[str]) -> None:
    """Against float64 of the rounded numbers; a row's bits are those of the row alone, by both tiles."""
    device: Any = HostDevice(Element.F16)
    device.hopper, device.compute_capability, device.multiprocessors = True, (9, 0), 2
    trial = ExpertTrial(device, Experts(count=2, used=1, width=144), 208, Format.FP8)
    x, logits = trial.inputs(330)
    assert [trial.tile_rows(rows) for rows in (1, 70, 330)] == [64, 64, 128]
    found = {rows: trial.check(x[:rows], logits[:rows]) for rows in (1, 70, 330)}
    for rows in (70, 330):
        assert_same(results(found[1], slice(None)), results(found[rows], slice(1)))
    assert_same(results(found[70], slice(None)), results(found[330], slice(70)))
    assert launched >= {f"gemm_{name}_{rows}" for name in ("two", "floats") for rows in (64, 128)}


def test_wgmma_has_the_bits_of_mma(launched: set[str]) -> None:
    """On Hopper many rows go through other kernels: sums on the host have no order of their own."""
    device: Any = HostDevice(Element.F16)
    device.hopper, device.compute_capability = True, (9, 0)
    trial = ExpertTrial(device, Experts(count=2, used=2, width=32))
    x, logits = trial.inputs(70)
    found = {rows: trial.check(x[:rows], logits[:rows]) for rows in (3, 20, 40, 70)}
    for rows in (20, 40, 70):
        assert_same(results(found[3], slice(None)), results(found[rows], slice(3)))
    tiles = ("hopper_{}_32", "hopper_{}_64", "gemm_{}_128")
    assert launched >= {tile.format(name) for name in ("two", "floats") for tile in tiles}
