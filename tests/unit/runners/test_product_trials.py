"""The host's part of the GPU test of real products: what it launches, and how it notices faults."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from nightmill.worker.model.spec import Activation
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.reference import ops
from tests.gpu import product_trials, qkv_trials
from tests.gpu.product_trials import Trial, activated, group_of, groups
from tests.gpu.qkv_trials import QkvTrial
from tests.gpu.resident import ResidentWeights
from tests.gpu.watched_process import run_watched
from tests.support.real_products import RealProduct, real_products
from tests.unit.runners.recorded_cuda import install_uncompiled

HOPPER = (9, 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    """One that computes nothing, and kernels that nobody compiles."""
    install_uncompiled(monkeypatch, tmp_path, HOPPER)
    with Device() as device:
        yield device


def smallest(kind: Kind, formats: str) -> list[RealProduct]:
    """Some products of a group."""
    found = [one for one in real_products() if group_of(one) == (kind.value, formats)]
    return sorted(found, key=lambda one: one.parts[0].rows * one.inputs)[:2]


def test_every_product_is_in_one_group() -> None:
    assert {group_of(product) for product in real_products()} == set(groups())
    assert {kind for kind, _ in groups()} == {"product", "float", "swiglu", "geglu", "residual", "addend"}
    assert ("product", "Q4_K+") in groups() and ("swiglu", "Q4_0+") in groups()


@pytest.mark.parametrize(
    ("kind", "formats"),
    [
        (Kind.RESIDUAL, "Q4_1"), (Kind.PLAIN, "Q5_0+"), (Kind.SWIGLU, "Q4_K"), (Kind.ADDEND, "F16"),
        (Kind.GEGLU, "Q8_0"), (Kind.SWIGLU, "FP8"), (Kind.RESIDUAL, "FP8"),
    ],
    ids=str,
)  # fmt: skip
def test_every_way_is_launched_at_every_number_of_rows(
    device: Device, kind: Kind, formats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a product that gives zeros, NumPy's part alone says that something is wrong."""
    said: list[str] = []
    monkeypatch.setattr(product_trials, "say", said.append)
    products = smallest(kind, formats)
    trial = Trial(device, kind, products)
    for product in products:
        trial.take([Format[part.format] for part in product.parts], [product])
        faults = list(trial.faults(product))
        assert faults and all("by NumPy" in fault for fault in faults), faults
        for rows in (1, 3, 8, 17, 64, 200, 2048):
            assert any(f"{product}, {rows} rows, " in line for line in said), rows
    assert trial.launched > 7 * len(products)


@pytest.mark.parametrize("formats", ["Q4_1", "Q4_K+Q6_K"])
def test_every_tile_of_queries_keys_and_values_is_launched(
    device: Device, formats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(qkv_trials, "say", said.append)
    found = [one for one in qkv_trials.suited() if qkv_trials.group_of(one)[2] == formats]
    one = min(found, key=lambda one: one.width * one.attention.qkv)
    trial = QkvTrial(device, [Format[part.format] for part in one.parts], one.width)
    assert list(trial.faults(one)) == []
    for rows in (1, 3, 8, 17, 64, 200, 2048):
        assert any(f"{one}, {rows} rows, " in line for line in said), rows
    monkeypatch.setattr(trial._compared, "other_bits", lambda *arguments: (3, 9))
    assert "3 words of keys have other bits, the first is 9" in "\n".join(trial.faults(one))


def test_wrong_results_are_told_by_their_place(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    (product, *_) = products = smallest(Kind.RESIDUAL, "Q4_1")
    trial = Trial(device, Kind.RESIDUAL, products)
    trial.take([Format.Q4_1], [product])
    monkeypatch.setattr(product_trials, "say", lambda line: None)
    monkeypatch.setattr(trial._compared, "other_bits", lambda *arguments: (5, product.outputs + 7))
    monkeypatch.setattr(trial._compared, "not_poison", lambda *arguments: (2, 1))
    faults = "\n".join(trial.faults(product))
    assert "words have other bits, the first at row 1, output 7" in faults
    assert "wrote 2 words before its results, the first 4 bytes from there" in faults
    assert "wrote 2 words behind its rows" in faults


def test_sums_by_numpy_are_those_of_the_rows_in_the_pool(device: Device) -> None:
    (product, *_) = smallest(Kind.PLAIN, "Q5_0+")
    trial = Trial(device, Kind.PLAIN, [product])
    formats = [Format[part.format] for part in product.parts]
    trial.take(formats, [product])
    x = np.random.default_rng(0).standard_normal(product.inputs)
    first, second = product.parts[:2]
    found = trial._sums(product, np.array([0, first.rows - 1, first.rows, product.outputs - 1]), x)
    for index, (kept, row) in enumerate([(formats[0], 0), (formats[0], first.rows - 1), (formats[1], 0)]):
        pool = ResidentWeights(device, kept)
        block, bytes_of_block = GGML_QUANT_SIZES[pool.kind]
        size = product.inputs // block * bytes_of_block
        places = (row * size + np.arange(size)) % pool._period
        exact = dequantize(pool._pool[places], pool.kind).reshape(-1)
        assert found[index] == pytest.approx(exact.astype(np.float16).astype(float) @ x)
    assert second.rows and np.isfinite(found).all()


def test_parts_of_a_tensor_are_where_its_bytes_are_in_the_pool(device: Device) -> None:
    pool = ResidentWeights(device, Format.Q4_1)
    raw = np.broadcast_to(np.zeros(1, dtype=np.uint8), (150 << 20,))
    at = 0
    for address, start, taken in pool.parts(raw, 360):
        assert start == at and address % 16 == 0 and (start % 360, taken > 0) == (0, True)
        assert (address - pool._base) == start % pool._period
        assert address + taken <= pool._base + pool._period * (-(-(48 << 20) // pool._period) + 1)
        at += taken
    assert at == len(raw)


def test_activations_are_those_of_the_definition() -> None:
    gate, ones = np.linspace(-6, 6, 101), np.ones(101)
    np.testing.assert_allclose(
        activated(gate, Activation.SILU), ops.swiglu(np.concatenate([gate, ones])), rtol=1e-6
    )
    np.testing.assert_allclose(
        activated(gate, Activation.GELU), ops.geglu(np.concatenate([gate, ones])), rtol=1e-6
    )


def test_a_process_that_says_nothing_more_is_killed_and_its_last_line_told() -> None:
    hangs = "import time; print('now: a product', flush=True); time.sleep(600)"
    outcome = run_watched(["-c", hangs], lambda line: 1.0 if line else 60.0)
    assert outcome.hung and "now: a product" in str(outcome)


def test_a_process_that_dies_is_told_with_what_was_kept() -> None:
    dies = (
        "import os; print('WRONG: one'); [print(n) for n in range(50)]; print('now: another', flush=True);"
        "os.kill(os.getpid(), 11)"
    )
    outcome = run_watched(["-c", dies], lambda line: 60.0, keep=lambda line: line.startswith("WRONG"))
    assert outcome.code == -11 and not outcome.hung
    assert outcome.lines[0] == "WRONG: one" and outcome.lines[-1] == "now: another"
    assert "killed by signal 11" in str(outcome)
