"""The kernels of rows, compiled for the host, by the tests that hold them on a GPU, with a few rows.

So what they compute is known without a GPU; `tests/gpu` holds what nvcc makes of them.
"""

from pathlib import Path
from typing import Any

import pytest

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.rows.activate import COMPUTED
from tests.gpu import test_kernels_pooling
from tests.gpu import test_kernels_rotation as rotation_on_gpu
from tests.gpu import test_kernels_rows as on_gpu
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.host_launchers import run_rows_on_host

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    monkeypatch.setattr(on_gpu, "ROWS", (1, 7))
    monkeypatch.setattr(on_gpu, "WIDTHS", (8, 2056, 4104))
    monkeypatch.setattr(on_gpu, "CONTEXT", 100)
    monkeypatch.setattr(rotation_on_gpu, "ROWS", (1, 7, 65))
    return run_rows_on_host(monkeypatch, folder)


@pytest.fixture(params=Element, ids=lambda element: element.value)
def device(request: pytest.FixtureRequest) -> Any:
    return HostDevice(request.param)


def test_embedding_scaled_and_not_and_logits(launched: set[str], device: Any) -> None:
    on_gpu.test_embedding_rows_are_the_tables(device)
    on_gpu.test_embeddings_are_scaled(device)
    on_gpu.test_logits_are_scaled_and_capped(device, 0.25, 2.0)
    assert launched == {"embed", "scale_logits"}


@pytest.mark.parametrize("kept", [None, Format.Q4_K, Format.Q8_0], ids=str)
def test_layers_inputs(launched: set[str], device: Any, kept: Format | None) -> None:
    on_gpu.test_layers_inputs_are_made_of_two_embeddings(device, kept)
    name = "layer_inputs" if kept is None else f"layer_inputs_{kept.name}"
    assert launched - {f"repack_{kept.name}" if kept else ""} == {name, "gate_inputs"}


def test_suppressed_logits(launched: set[str]) -> None:
    device: Any = HostDevice()
    on_gpu.test_suppressed_logits_are_never_the_largest(device)
    assert launched == {"scale_logits", "suppress_logits"}


def test_hidden_states_are_added_in_order(launched: set[str], device: Any) -> None:
    test_kernels_pooling.test_hidden_states_are_added_to_the_sums_of_slots_in_their_order(device)
    assert launched == {"pool_rows"}


@pytest.mark.parametrize(("width", "pieces"), [(8, 1), (2056, 2), (4104, 4)])
@pytest.mark.parametrize("kind", ["none", "RMS", "centred, bias"])
def test_norms_and_sums_between_products(launched: set[str], kind: str, width: int, pieces: int) -> None:
    device: Any = HostDevice()
    on_gpu.test_norms(device, kind, width)
    other = "nothing" if kind == "RMS" else "centred, bias"
    on_gpu.test_what_a_product_gives_is_normed_scaled_added_and_normed_again(device, kind, other, width)
    assert f"residual_{pieces}" in launched


def test_either_kernel_gives_the_bits_of_an_rms_norm(launched: set[str], device: Any) -> None:
    on_gpu.test_either_kernel_gives_the_bits_of_an_rms_norm(device)
    assert launched == {f"{name}_{pieces}" for name in ("rms_norm", "residual") for pieces in (1, 2, 4)}


def test_rows_rounded_to_fp8_alone_and_as_they_are_normed(
    monkeypatch: pytest.MonkeyPatch, launched: set[str]
) -> None:
    device: Any = HostDevice()
    monkeypatch.setattr(on_gpu, "LONG_WIDTHS", ())
    on_gpu.test_rows_are_rounded_to_fp8(device)
    on_gpu.test_an_rms_norm_rounds_to_fp8_what_it_would_give(device)
    names = ("quantise", "rms_norm", "rms_norm_fp8")
    assert launched == {f"{name}_{pieces}" for name in names for pieces in (1, 2, 4)}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_activations(launched: set[str], device: Any, bias: bool) -> None:
    for activation in COMPUTED:
        for gated in (True, False):
            on_gpu.test_activations(device, 1000, activation, gated, bias)
    assert launched == {
        "swiglu",
        "geglu",
        "silu",
        "gelu",
        "reglu_squared",
        "relu_squared",
        "geglu_erf",
        "gelu_erf",
    }


@pytest.mark.parametrize("style", RopeStyle)
@pytest.mark.parametrize("kind", rotation_on_gpu.KINDS)
def test_what_is_done_to_heads(launched: set[str], kind: str, style: RopeStyle) -> None:
    device: Any = HostDevice()
    rotation_on_gpu.test_qkv_is_normed_rotated_and_written(device, kind, style, 3, 1, 40, normed=True)
    assert launched - {"qk_statistics"} == {"qkv_rope_write", "rope_table"}


@pytest.mark.parametrize("heads", [(3, 1, 40), (4, 2, 512)], ids=str)
@pytest.mark.parametrize("kind", rotation_on_gpu.OTHERS)
def test_heads_that_a_layer_does_not_make(
    launched: set[str], kind: str, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions up to 40,000 are for `test_what_is_done_to_heads`: a table of so many takes seconds here."""
    device: Any = HostDevice()
    monkeypatch.setattr(rotation_on_gpu, "CONTEXT", 2000)
    rotation_on_gpu.test_heads_that_a_layer_does_not_make(device, kind, heads)
    assert launched == {"qkv_rope_write", "rope_table"}
