"""Launchers of CUDA run on the host in a test: those of attention, rows, products, experts, whole models."""

import shutil
from pathlib import Path
from types import ModuleType

import pytest

from nightmill.worker.runners.gpu.attention import (
    decode,
    general,
    hopper_wide,
    latent_rows,
    prefill,
    wide,
    widening,
)
from nightmill.worker.runners.gpu.experts import combine, grouped, route
from nightmill.worker.runners.gpu.products import agreeing
from nightmill.worker.runners.gpu.products.elements import mma_gemm
from nightmill.worker.runners.gpu.products.fp8 import mma_fp8, quantise
from nightmill.worker.runners.gpu.products.packed import packed_few, packed_gemm, packed_mma, packed_rows
from nightmill.worker.runners.gpu.rows import (
    activate,
    embedding,
    layer_inputs,
    logits,
    norms,
    pooling,
    rotation,
)
from nightmill.worker.runners.gpu.states import chunks, convolution, delta_net, mamba2, recurrent
from nightmill.worker.runners.gpu.weights import repacker
from tests.support import packed_weights, reference_kernels
from tests.support.needs import Need, missing
from tests.unit.runners.host_kernels import HostMaps, HostModule, Staged


def run_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """Launchers of attention launch on the host from now on; which kernels they did."""
    launched = launch_on_host(patch, folder, "warps", (decode, prefill, general, wide, latent_rows))
    for module in (hopper_wide, prefill, widening):
        patch.setattr(module, "Module", HostModule)
    for module in (hopper_wide, prefill):
        patch.setattr(module, "TensorMaps", HostMaps)
    return launched


def run_rows_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """The same of launchers of rows."""
    modules = (activate, embedding, layer_inputs, logits, norms, pooling, quantise, rotation)
    patch.setattr(repacker, "Module", HostModule)
    patch.setattr(packed_weights, "Staging", Staged)
    return launch_on_host(patch, folder, "rows", modules)


def run_packed_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """The same of products of few rows with packed weights."""
    launched = launch_on_host(patch, folder, "warps", (activate,))
    for module in (packed_few, packed_gemm, packed_mma, packed_rows, repacker):
        patch.setattr(module, "Module", HostModule)
    patch.setattr(packed_gemm, "TensorMaps", HostMaps)
    return launched


def run_mma_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """The same of products by tiles of `mma_gemm.cu`."""
    launched = launch_on_host(patch, folder, "warps", (quantise,))
    for module in (mma_gemm, mma_fp8, agreeing):
        patch.setattr(module, "Module", HostModule)
    patch.setattr(HostModule, "together", False)
    return launched


def run_references_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """The same of the readable kernels."""
    launched = launch_on_host(patch, folder, "rows", (norms, rotation))
    for module in (reference_kernels, repacker):
        patch.setattr(module, "Module", HostModule)
    patch.setattr(HostModule, "together", False)
    return launched


def run_states_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """The same of layers with states."""
    launched = launch_on_host(patch, folder, "warps", (chunks, convolution, delta_net, mamba2, recurrent))
    patch.setattr(HostModule, "together", True)
    return launched


def run_experts_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """The same of mixtures of experts."""
    launched = launch_on_host(patch, folder, "warps", (route, combine))
    for module in (grouped, repacker):
        patch.setattr(module, "Module", HostModule)
    patch.setattr(grouped, "TensorMaps", HostMaps)
    patch.setattr(HostModule, "together", True)
    patch.setattr(packed_weights, "Staging", Staged)
    return launched


def run_models_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """The same of whole models, but for products and layers with states."""
    rows = (activate, embedding, layer_inputs, logits, norms, rotation)
    attention = (decode, prefill, general, wide)
    launched = launch_on_host(patch, folder, "models", (*rows, *attention, route, combine))
    for module in (grouped, prefill, repacker):
        patch.setattr(module, "Module", HostModule)
    patch.setattr(grouped, "TensorMaps", HostMaps)
    return launched


def launch_on_host(
    patch: pytest.MonkeyPatch, folder: Path, stands: str, launchers: tuple[ModuleType, ...]
) -> set[str]:
    """stands: the folder with what stands for headers of ours."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        missing(Need.COMPILER)
    launched: set[str] = set()
    said = {"folder": folder, "launched": launched, "stands": stands, "together": stands == "rows"}
    for name, value in said.items():
        patch.setattr(HostModule, name, value, raising=False)
    for module in launchers:
        patch.setattr(module, "KernelPairs", HostModule)
    return launched
