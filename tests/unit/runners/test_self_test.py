"""A model's products are held against NumPy before it takes jobs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Activation, Role
from nightmill.worker.runners.gpu.device.device import DeviceLostError
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.self_test import ROWS, CheckedProduct, FileRows, _sampled, check_products
from nightmill.worker.runners.gpu.weights.head_order import HeadOrder
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.rounding import as_fp8
from nightmill.worker.runners.starting import SelfTestError
from tests.support.quantised_models import write
from tests.unit.test_quantised_models import SMALL

OUTPUTS, INPUTS = 48, 64
Floats = npt.NDArray[np.float64]


@dataclass
class StubDevice:
    """Memory is arrays, by their addresses."""

    element: Element = Element.F16
    lost: bool = False
    memory: dict[int, npt.NDArray[Any]] = field(default_factory=dict)

    def allocate(self, size: int, purpose: str) -> int:
        self.memory[1] = np.zeros(size, dtype=np.uint8)
        return 1

    def copy_in(self, address: int, array: npt.NDArray[Any]) -> None:
        self.memory[address] = array

    def download(self, address: int, shape: tuple[int, int], dtype: Any) -> npt.NDArray[Any]:
        return np.ascontiguousarray(self.memory[address][: shape[0]]).view(dtype)

    def fill(self, address: int, value: int, size: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def free(self, address: int) -> None:
        del self.memory[address]


@pytest.fixture
def device() -> StubDevice:
    return StubDevice()


def product(
    device: StubDevice, *, activation: Activation | None = None, floats: bool = False,
    kept: Format = Format.Q4_K, fault: Callable[[Floats, int], None] = lambda y, rows: None, seed: int = 3,
) -> CheckedProduct:  # fmt: skip
    """One that computes as it should, but for a fault; FP8 rounds activations and weights."""
    rows_of_weight = OUTPUTS * (2 if activation else 1)
    weight = np.random.default_rng(seed).standard_normal((rows_of_weight, INPUTS)).astype(np.float16) / 8
    rounds = as_fp8 if kept is Format.FP8 else np.asarray
    gated = ops.swiglu if activation is Activation.SILU else ops.geglu

    def compute(x: Buffer, matrix: Matrix, y: Buffer, rows: int) -> None:
        halves = device.memory[x.address].view(np.float16)[:rows]
        sums = rounds(halves.astype(np.float64)) @ rounds(weight.astype(np.float64)).T
        results = gated(sums) if activation else sums
        fault(results, rows)
        device.memory[y.address] = results.astype(np.float32 if floats else np.float16)

    y = Buffer(2, (64, OUTPUTS), FLOAT if floats else ELEMENT)
    matrix = Matrix(3, rows_of_weight, INPUTS, kept)
    return CheckedProduct("down of layer 7", compute, matrix, y, activation, lambda rows: weight[rows])  # type: ignore[arg-type]


def check(device: StubDevice, one: CheckedProduct) -> list[str]:
    told: list[str] = []
    check_products(device, [one], told.append)  # type: ignore[arg-type]
    return told


@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize("activation", [None, Activation.SILU, Activation.GELU])
def test_right_products_pass_and_are_told_before_they_are_launched(
    device: StubDevice, activation: Activation | None, floats: bool
) -> None:
    told = check(device, product(device, activation=activation, floats=floats))
    assert told == [f"down of layer 7, {rows} rows" for rows in ROWS]
    assert 1 not in device.memory, "what it took is given back"


def one_output(y: Floats, rows: int) -> None:
    y[:, -1] += 1.0


def only_many_rows(y: Floats, rows: int) -> None:
    y[8:16] = y[:8] if rows > 8 else y[8:16]


def not_a_number(y: Floats, rows: int) -> None:
    y[rows - 1, :] = np.nan


@pytest.mark.parametrize("fault", [one_output, only_many_rows, not_a_number])
def test_a_wrong_product_is_named_with_its_place_and_the_remedy(
    device: StubDevice, fault: Callable[[Floats, int], None]
) -> None:
    with pytest.raises(SelfTestError, match=r"down of layer 7 .*should be .*--weights 16bit") as raised:
        check(device, product(device, fault=fault))
    assert ("for 64 rows" in str(raised.value)) == (fault is only_many_rows)


@pytest.mark.parametrize("seed", range(12))
def test_what_fp8_rounds_is_no_fault(device: StubDevice, seed: int) -> None:
    one = product(device, activation=Activation.SILU, kept=Format.FP8, seed=seed)
    check(device, one)
    with pytest.raises(SelfTestError):
        check(device, replace(one, matrix=replace(one.matrix, format=Format.Q4_K)))


def test_an_fp8_product_that_is_a_little_off_is_found(device: StubDevice) -> None:
    def one_output_of_one_row(y: Floats, rows: int) -> None:
        y[0, 0] += 0.5 * np.sqrt(np.mean(np.square(y)))

    with pytest.raises(SelfTestError, match="row 0, output 0"):
        check(device, product(device, kept=Format.FP8, fault=one_output_of_one_row))


def test_a_trap_goes_up_as_it_is(device: StubDevice) -> None:
    def trap(y: Floats, rows: int) -> None:
        device.lost = True
        raise DeviceLostError("an illegal instruction")

    with pytest.raises(DeviceLostError):
        check(device, product(device, fault=trap))
    assert issubclass(DeviceLostError, RunnerError)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    with GgufFile.open(write(path, SMALL, "Q4_K_M", pool_bytes=1 << 19)) as file:
        yield file


def test_rows_of_a_stack_are_those_of_the_files_tensors(file: GgufFile) -> None:
    spec = read_spec(file)
    weight = spec.layer_weights(0)[Role.QKV]
    whole = np.concatenate([file.array(name) for name in weight.names])
    rows = np.array([0, 255, 256, 383, 384, 511])
    found = FileRows(file, weight, HeadOrder(spec.layers[0].attention))(rows)
    np.testing.assert_allclose(found, whole[rows])
    beyond = FileRows(file, weight)(np.array([len(whole)]))
    assert not beyond.any(), "rows of padding are zeros"


def test_a_bias_is_read_as_rows_of_one_number(file: GgufFile) -> None:
    weight = read_spec(file).layer_weights(1)[Role.QKV_BIAS]
    whole = np.concatenate([file.array(name) for name in weight.names])
    found = FileRows(file, weight)(np.arange(len(whole)))
    np.testing.assert_allclose(found[:, 0], whole)


def test_of_a_longer_row_only_the_first_outputs_are_compared(device: StubDevice) -> None:
    def behind(y: Floats, rows: int) -> None:
        y[:, 30:] = 0

    one = product(device, fault=behind)
    check(device, replace(one, compared=30))
    with pytest.raises(SelfTestError):
        check(device, one)


def test_the_ends_of_all_parts_are_looked_at(device: StubDevice) -> None:
    parts = tuple(Matrix(3, rows, INPUTS, Format.Q4_K) for rows in (30, 10, 8))
    one = product(device)
    sampled = _sampled(replace(one, matrix=replace(one.matrix, parts=parts)), np.random.default_rng(0))
    assert {0, 29, 30, 39, 40, 47} <= set(sampled.tolist())
    assert sampled.max() == OUTPUTS - 1


def test_a_bias_is_added(device: StubDevice) -> None:
    bias = np.arange(OUTPUTS, dtype=np.float64)

    def biased(y: Floats, rows: int) -> None:
        y += bias

    one = product(device, fault=biased)
    check(device, replace(one, bias=bias))
    with pytest.raises(SelfTestError):
        check(device, one)


def test_rows_are_in_the_gpus_order_of_heads(file: GgufFile) -> None:
    weight = read_spec(file).layer_weights(0)[Role.QKV]
    order = SimpleNamespace(arranged=lambda raw, first, rows: raw.reshape(rows, -1)[::-1].reshape(-1))
    backwards = FileRows(file, weight, order)(np.array([0]))  # type: ignore[arg-type]
    np.testing.assert_allclose(backwards[0], file.array(weight.names[0])[-1])
