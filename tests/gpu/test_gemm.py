"""Products on the GPU against float64, at sizes that fit no tile, with poison all around."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.gpu.comparing import nmse
from worker.runners.gpu.device import Device
from worker.runners.gpu.gemm import Gemm, padded_rows

LIMIT = 5e-5
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 65, 257, 1000)
SIZES = ((1152, 896), (896, 4864), (9728, 896), (515, 72), (4096, 256))  # outputs, inputs


def operands(rows: int, outputs: int, inputs: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    rng = np.random.default_rng(rows * outputs + inputs)
    x = rng.standard_normal((rows, inputs)).astype(np.float16)
    return x, (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float16)


@pytest.mark.parametrize("floats", [False, True], ids=["half", "float"])
@pytest.mark.parametrize("own", [False, True], ids=["cublaslt", "own"])
def test_products_are_exact_to_rounding(device: Device, own: bool, floats: bool) -> None:
    gemm = Gemm(device, own_kernels=own)
    dtype = np.float32 if floats else np.float16
    for outputs, inputs in SIZES:
        for rows in ROWS if not own else ROWS[:8]:
            x, weight = operands(rows, outputs, inputs)
            room = padded_rows(rows)
            poisoned = np.full((room + 1, inputs), np.nan, dtype=np.float16)
            poisoned[:rows] = x
            y = device.upload(np.full((room + 1, outputs), np.nan, dtype=dtype))
            addresses = device.upload(poisoned), device.upload(weight)
            gemm(*addresses, y, rows, outputs, inputs, floats=floats)
            result = device.download(y, (room + 1, outputs), dtype)
            error = nmse(result[:rows], x.astype(np.float64) @ weight.astype(np.float64).T)
            assert error <= (1e-10 if floats else 1e-6) <= LIMIT, (rows, outputs, inputs, error)
            assert np.isnan(result[room]).all(), "wrote past its rows"
            for address in (*addresses, y):
                device.free(address)
    gemm.close()


def test_every_candidate_and_the_tuned_choice_agree(device: Device) -> None:
    gemm = Gemm(device)
    for rows, outputs, inputs in ((1, 896, 896), (4, 1152, 896), (8, 896, 4864), (256, 896, 4864)):
        x, weight = operands(rows, outputs, inputs)
        y = device.upload(np.full((rows, outputs), np.nan, dtype=np.float16))
        addresses = device.upload(x), device.upload(weight)
        gemm.tune(addresses[0], [addresses[1]], y, (rows, outputs, inputs, False))
        device.fill(y, 0xFF, rows * outputs * 2)
        gemm(*addresses, y, rows, outputs, inputs)
        result = device.download(y, (rows, outputs), np.float16)
        assert nmse(result, x.astype(np.float64) @ weight.astype(np.float64).T) <= 1e-6
    gemm.close()


@pytest.mark.parametrize("tuned", [False, True], ids=["guessed", "tuned"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(device: Device, tuned: bool) -> None:
    gemm = Gemm(device, reproducible=True)
    for outputs, inputs in (*SIZES[:3], (256, 832)):
        x, weight = operands(1024, outputs, inputs)
        out = device.allocate(1024 * outputs * 2)
        addresses = device.upload(x), device.upload(weight)
        expected = None
        for rows in (1024, 1, 2, 5, 8, 9, 24, 63, 65, 200, 256, 300, 700):
            if tuned:
                gemm.tune(addresses[0], [addresses[1]], out, (rows, outputs, inputs, False))
            gemm(*addresses, out, rows, outputs, inputs)
            result = device.download(out, (rows, outputs), np.float16)
            expected = result if expected is None else expected
            np.testing.assert_array_equal(result, expected[:rows], err_msg=f"{rows} {outputs} {inputs}")
    gemm.close()


def test_a_fault_of_one_percent_would_be_seen() -> None:
    x, weight = operands(65, 515, 72)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    assert nmse(expected * 1.01, expected) > LIMIT
    broken = expected.copy()
    broken[0, 0] = np.nan
    assert nmse(broken, expected) > LIMIT
