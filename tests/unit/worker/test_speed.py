"""The speed to expect of a GPU is about what was measured on one."""

from dataclasses import replace

import pytest

from nightmill.worker.assembly.speed import (
    EqualSequences,
    GpuSpeed,
    WeightsAndCache,
    expected_rate,
    step_cost,
)
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS
from nightmill.worker.runners.gpu.device.peaks import Peaks, peaks_of
from nightmill.worker.runners.gpu.kv_cache import page_bytes
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.weights.layout import weight_bytes
from tests.support.specs import GEMMAS, dense_spec
from tests.unit.worker.test_formats_fit import of_type

H200 = peaks_of((9, 0), 132, clock_khz=1_980_000, memory_khz=3_201_000, bus_bits=6144)
TINY = dense_spec(name="tiny", layers=6, width=256, heads=4, kv_heads=2, ffn_width=832, vocab=4096)
SPECS = {
    "tiny": TINY,
    "0.5B": dense_spec(name="0.5B", layers=24, vocab=151_936),
    "7B": of_type("Q4_K_M"),
    "7B in Q8_0": of_type("Q8_0"),
}


def rate(model: str, sequences: int, prompt: int = 512, answer: int = 256, kept: str = "16bit") -> float:
    spec, precision = SPECS[model], Precision(weights=WeightsFormat(kept))
    size = WeightsAndCache(weight_bytes(spec, precision), page_bytes(spec), precision.weights)
    return expected_rate(spec, GpuSpeed(H200, 132), size, EqualSequences(sequences, prompt, answer))


def test_an_h200_is_what_its_data_sheet_says() -> None:
    assert pytest.approx(4.8e12, rel=0.03) == H200.bytes
    assert pytest.approx(989e12, rel=0.1) == H200.flops
    assert replace(H200) == Peaks(H200.bytes, H200.flops)


@pytest.mark.parametrize(
    ("model", "sequences", "prompt", "measured"),  # benchmarks/RESULTS.md, answers of 256
    [
        ("0.5B", 1, 128, 1_902), ("0.5B", 256, 512, 115_654), ("0.5B", 1024, 512, 137_848),
        ("7B", 1, 128, 243), ("7B", 64, 512, 8_591), ("7B", 256, 512, 12_660),
    ],
)  # fmt: skip
def test_it_is_about_what_was_measured(model: str, sequences: int, prompt: int, measured: float) -> None:
    assert rate(model, sequences, prompt) == pytest.approx(measured, rel=0.21)


@pytest.mark.parametrize(
    ("model", "kept", "sequences", "prompt", "measured"),
    [
        ("0.5B", "fp8", 1, 128, 1_480), ("0.5B", "fp8", 256, 512, 120_315),
        ("0.5B", "fp8", 1024, 512, 155_675),
        ("7B", "fp8", 1, 128, 401), ("7B", "fp8", 64, 512, 13_293), ("7B", "fp8", 256, 512, 18_788),
        ("7B", "file", 1, 128, 384), ("7B", "file", 64, 512, 8_785), ("7B", "file", 256, 512, 11_409),
        ("7B in Q8_0", "file", 1, 128, 362), ("7B in Q8_0", "file", 256, 512, 11_777),
    ],
)  # fmt: skip
def test_it_is_about_what_was_measured_in_other_formats(
    model: str, kept: str, sequences: int, prompt: int, measured: int
) -> None:
    assert rate(model, sequences, prompt, kept=kept) == pytest.approx(measured, rel=0.21)


def test_what_is_in_16_bits_in_the_file_is_as_fast_as_16_bits() -> None:
    assert rate("0.5B", 64, kept="file") == rate("0.5B", 64)


def test_a_tiny_model_is_as_fast_as_its_host() -> None:
    assert rate("tiny", 1) < 10_000  # steps of 0.1 ms
    assert (
        rate("tiny", 2048, 384, 128) <= 2_165 * 128
    )  # rows a second that a worker brings if it computes nothing


def test_a_step_is_counted() -> None:
    """A 7B in 16 bits: two bytes a parameter, but for the table of which a row is read."""
    spec, card = SPECS["7B"], KNOWN_CARDS["rtx4090"]
    size = WeightsAndCache(2 * spec.parameters, page_bytes(spec), WeightsFormat.ELEMENT)
    gpu = GpuSpeed(card.peaks, card.multiprocessors)
    one, many = (step_cost(spec, gpu, size, sequences, 1000) for sequences in (1, 512))
    read = spec.parameters - spec.vocab * spec.width
    assert one.weights == many.weights == 2 * read and one.flops == 2 * read
    assert many.flops == 512 * one.flops and many.cache == 512 * one.cache
    assert one.cache == pytest.approx(1000 / 16 * page_bytes(spec))
    assert one.reading == pytest.approx(2 * read / (0.75 * 1.008e12))
    assert one.bound == "reading weights" and many.bound in ("multiplying", "reading keys, values and states")
    assert one.seconds == pytest.approx(one.reading + one.attending + one.between)
    small = step_cost(SPECS["tiny"], gpu, replace(size, weights=2 * SPECS["tiny"].parameters), 1, 0)
    assert small.bound in ("the host", "the way from kernel to kernel")


def test_windows_hide_keys_and_layers_without_keys_of_their_own_read_those_of_others() -> None:
    spec = GEMMAS["layers that read others' keys"]
    # twice a window of 20 over two heads of 16, and all of one head of 24
    size, context = WeightsAndCache(1 << 20, page_bytes(spec), WeightsFormat.ELEMENT), 100
    read, kept = 2 * (2 * 16 * 20 / context + 24), 2 * 16 + 24
    counted = step_cost(spec, GpuSpeed(H200, 132), size, 3, context)
    assert counted.cache == pytest.approx(3 * context * page_bytes(spec) / 16 * read / kept)
    assert step_cost(spec, GpuSpeed(H200, 132), size, 3, 10).cache == pytest.approx(
        30 * page_bytes(spec) / 16 * 2
    )
