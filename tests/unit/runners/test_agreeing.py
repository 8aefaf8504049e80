"""Candidates that give other bits are not chosen, however fast they are."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.agreeing import Agreement
from nightmill.worker.runners.gpu.products.elements.mma_gemm import MmaTiles
from nightmill.worker.runners.gpu.products.mma_tiles import MMA_TILES
from nightmill.worker.runners.gpu.shapes import Candidate, Kernel, Kind, Shape
from tests.support.cuda_runners import cuda_runner
from tests.support.elements import as_words
from tests.support.operands import room
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.host_launchers import run_mma_on_host
from tests.unit.runners.recorded_cuda import AMPERE, HOPPER, RecordedDriver, install_uncompiled

MODEL = Path(__file__).parents[3] / "models" / "nightmill-demo.gguf"
SIZES: dict[str, Any] = {"slots": 8, "context": 128, "kv_pages": 64, "max_tokens": 2048}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", [Kind.FLOAT, Kind.RESIDUAL, Kind.PLAIN], ids=lambda kind: kind.value)
def test_digests_tell_one_bit_of_one_result(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another tile agrees; one that is wrong in a bit, or by its place, does not."""
    run_mma_on_host(monkeypatch, tmp_path)
    device: Any = HostDevice(Element.F16)
    shape = Shape(3, 32, 72, kind)
    weights = np.random.default_rng(1).standard_normal((32, 72)).astype(np.float32)
    weight = Matrix(device.upload(as_words(weights, device.element)), 32, 72)
    x, y = room(device, (3, 72), ELEMENT), room(device, (3, 32), ELEMENT if kind is Kind.PLAIN else FLOAT)
    tiles = MmaTiles(device, alone=True)

    def candidate(name: str, spoil: Callable[[Any], None]) -> Candidate:
        def kernel(of: Shape) -> Kernel:
            exact = tiles.kernel(MMA_TILES[5], of)

            def spoilt(x: Buffer, weight: Matrix, y: Buffer) -> None:
                exact(x, weight, y)
                held = device.download(y.address, (3, 32), np.float16 if kind is Kind.PLAIN else np.float32)
                spoil(held)
                device.copy_in(y.address, held)

            return spoilt

        return Candidate(name, kernel, algorithm=name.encode())

    def next_bit(held: Any) -> None:
        held[2, 5] = np.nextafter(held[2, 5], held.dtype.type(9))

    def swapped(held: Any) -> None:
        held[1] = held[1, ::-1].copy()

    def same(held: Any) -> None: ...

    every = [candidate("bit", next_bit), candidate("same", same), candidate("places", swapped)]
    agreement = Agreement(device, tiles.reference)
    assert not agreement.trusts(every[1], shape)
    assert [one.name for one in agreement.agreeing(every, shape, x, weight, y)] == ["same"]
    assert agreement.trusts(every[1], replace(shape, rows=7)) and not agreement.trusts(every[0], shape)
    assert [set(names) for names in agreement.left_out.values()] == [{"bit", "places"}]
    numbers = device.download(x.address, (3, 72), np.float16)
    assert np.abs(numbers).max() <= 1 and len(np.unique(numbers)) > 200, "random, and each other"
    (alone,) = agreement.agreeing(every[:1], shape, x, weight, y)
    assert alone.name.startswith("mma "), "the reference, where none agrees"
    assert agreement.agreeing(every, replace(shape, format=Format.Q4_K), x, weight, y) == every


@pytest.mark.parametrize("capability", [HOPPER, AMPERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize("weights", [WeightsFormat.ELEMENT, WeightsFormat.FILE], ids=lambda one: one.value)
@pytest.mark.parametrize(
    "odd", [{0, 1}, *(pytest.param({one}, marks=pytest.mark.slow) for one in (0, 1))], ids=str
)
def test_an_algorithm_with_other_bits_is_never_used(
    capability: tuple[int, int], weights: WeightsFormat, odd: set[int], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Whichever is fastest, and for numbers of rows that nothing was timed for."""
    driver = install_uncompiled(monkeypatch, tmp_path, capability)
    driver.odd = frozenset(odd)
    tried = _used_after_tuning(driver, weights)
    assert {name for names in tried.values() for name in names} <= {"cuBLASLt", "elements, cuBLASLt"}
    assert not set(driver.ran) & odd


def test_where_all_agree_none_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = install_uncompiled(monkeypatch, tmp_path, AMPERE)
    assert not _used_after_tuning(driver, WeightsFormat.ELEMENT)
    assert set(driver.ran) == {0, 1}


def _used_after_tuning(driver: RecordedDriver, weights: WeightsFormat) -> dict[str, list[str]]:
    """Multiply any number of rows of each product; `driver.ran` is then what ran, the result what was not."""
    file = GgufFile.open(MODEL)
    with closing(cuda_runner(file, read_spec(file), precision=Precision(weights=weights), **SIZES)) as runner:
        products = runner._products
        assert products is not None
        driver.ran.clear()
        x, y, w = (Buffer(runner.device.allocate(1 << 30), (4096, 4096), ELEMENT) for _ in range(3))
        for (_, outputs, inputs, format_), product in products._known.items():
            rows = outputs if product.activation is None else 2 * outputs
            for count in (1, 7, 100, 700, 1025, 2048):
                if format_ is not Format.MIXED:
                    product(x, Matrix(w.address, rows, inputs, format_), y, count)
        return products.left_out()
