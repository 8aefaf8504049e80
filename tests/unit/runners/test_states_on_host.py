"""Kernels of layers with states on the host, lane by lane, against the reference runner in float64."""

from pathlib import Path
from typing import Any

import pytest

from nightmill.worker.model.spec import ShortConv
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.states import chunks
from tests.gpu import test_states_kernels as on_gpu
from tests.gpu.state_trials import AnyMixer, Piece, Trial, delta_net, mamba
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.host_launchers import run_states_on_host

pytestmark = pytest.mark.heavy

MIXERS: dict[str, AnyMixer] = {
    "short": ShortConv(width=24, kernel=3),
    "delta": delta_net(1, 2, 32, 64),
    "mamba": mamba(2, 64, 1, 32),
}
LAUNCHED = {
    "short": {"convolve_prompts", "keep_inputs", "convolve_drawn"},
    "delta": {"delta_recurrent", "delta_prepare", "delta_scan_narrow", "norm_then_gate"},
    "mamba": {"mamba_recurrent", "mamba_prepare", "mamba_scan_narrow", "gate_then_norm"},
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    return run_states_on_host(monkeypatch, tmp_path)


@pytest.mark.parametrize("kind", MIXERS)
def test_prompts_and_drawn_tokens(launched: set[str], kind: str) -> None:
    device: Any = HostDevice(Element.F16)
    Trial(device, MIXERS[kind]).check([Piece(70), Piece(3, 64)], [Piece(1, 5), Piece(3, 130)], padding=1)
    assert launched == LAUNCHED[kind] | LAUNCHED["short"]


@pytest.mark.parametrize("kind", MIXERS)
def test_all_are_elements_of_a_bfloat16_model(launched: set[str], kind: str) -> None:
    device: Any = HostDevice(Element.BF16)
    Trial(device, MIXERS[kind], controls=False).check([], [Piece(1, 5)])  # chunks know nothing of elements


@pytest.mark.parametrize("kind", MIXERS)
def test_bits_depend_on_what_came_before_alone(
    monkeypatch: pytest.MonkeyPatch, launched: set[str], kind: str
) -> None:
    """Not on what follows, on how a prompt is cut, or on what else is in the launch."""
    monkeypatch.setattr(chunks, "_MOST_PIECES", 3)
    device: Any = HostDevice(Element.F16)
    device.compute_capability = (9, 0)  # the next chunk is copied while one is computed
    device.multiprocessors = 6  # several pieces have the blocks of many prompts
    trial = Trial(device, MIXERS[kind])
    on_gpu.follow(trial, 67, (1, 17, 65))
    on_gpu.cut(trial, 70, (64,))
    on_gpu.again(trial, 3)
    on_gpu.beside(trial, [Piece(66, 64)], 3)
    device.multiprocessors = 1  # several drawn pieces are convolved in the recurrence, one is not
    on_gpu.beside(trial, [], 3)
    if kind == "delta":
        assert launched >= {"delta_recurrent", "delta_recurrent_fused"}
    widths = {name.rpartition("_")[2] for name in launched} & {"wide", "narrow"}
    assert widths == (set() if kind == "short" else {"wide", "narrow"})


def test_value_heads_that_are_neighbours_share_keys(launched: set[str]) -> None:
    device: Any = HostDevice(Element.F16)
    device.hopper, device.compute_capability, device.multiprocessors = True, (9, 0), 2
    trial = Trial(device, delta_net(2, 6, 64, 64, by_key_head=True))
    trial.check([Piece(66)], [Piece(1, 5), Piece(2, 130)])
    device.multiprocessors = 1
    trial.check([], [Piece(1, 5), Piece(1, 7), Piece(1, 0)])
    assert {"delta_recurrent_fused", "delta_prepare", "delta_hopper_narrow"} <= launched


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_chunks_on_hopper(monkeypatch: pytest.MonkeyPatch, launched: set[str], kind: str) -> None:
    """Products with the state by wgmma, of tiles with the 128-byte swizzle."""
    mixers: list[AnyMixer] = [delta_net(1, 1), delta_net(1, 2, 64, 64)]
    if kind == "mamba":
        mixers = [mamba(2, 64, 1, 128), mamba(1, 128, 1, 64)]
    device: Any = HostDevice(Element.F16)
    device.hopper, device.compute_capability, device.multiprocessors = True, (9, 0), 3
    monkeypatch.setattr(chunks, "_MOST_PIECES", 3)
    trial = Trial(device, mixers[0])
    trial.check([Piece(130), Piece(3, 64)])
    on_gpu.follow(trial, 67, (65,))
    on_gpu.cut(trial, 70, (64,))
    on_gpu.beside(trial, [Piece(66, 64)], 3)
    assert launched >= {f"{kind}_prepare", f"{kind}_hopper_wide", f"{kind}_hopper_narrow"}
    Trial(device, mixers[1]).check([Piece(70, 64)])
