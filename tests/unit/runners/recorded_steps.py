"""Steps for runners on a driver that computes nothing (`recorded_cuda`), and benchmarks there."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.runners.base import FROM_SLOT, IntArray, StepBatch, make_draws
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.driving import Chunk, Pages

__all__ = ["allocations", "benchmarked", "decode_all", "take_steps", "two_sequences"]


def two_sequences(context: int, cut: int) -> list[list[Chunk]]:
    """A prompt in two chunks, the second with a drawn token of another sequence; then drawn ones of both."""
    tokens = [1] * context
    return [
        [Chunk(0, tokens, 0, cut), Chunk(1, tokens, 0, 9)],
        [Chunk(1, tokens, 9, 1, 1, True), Chunk(0, tokens, cut, 30)],
        [Chunk(1, tokens, 10, 1, 1, True), Chunk(0, tokens, cut + 30, 1, 1, True)],
    ]


def take_steps(runner: CudaRunner, pages: Pages, steps: list[list[Chunk]]) -> None:
    """Launch and collect steps one by one; the first admits its sequences."""
    for step in steps:
        runner.launch(pages.batch(step, admit=step is steps[0], kinds=runner.page_kinds))
        assert runner.collect() is not None


def allocations(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes of device memory that is allocated from now on and not freed yet, by address."""
    taken: dict[int, int] = {}
    allocate, free = Device.allocate, Device.free

    def noted(device: Device, size: int, purpose: str = "a buffer") -> int:
        address = allocate(device, size, purpose)
        taken[address] = size
        return address

    def freed(device: Device, address: int) -> None:
        del taken[address]
        free(device, address)

    monkeypatch.setattr(Device, "allocate", noted)
    monkeypatch.setattr(Device, "free", freed)
    return taken


def benchmarked(
    path: str, report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    *options: str,
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:  # fmt: skip
    """Run two benchmarks of a model file: the operations of the budget's steps, and the engine's lines."""
    asked = ["--context", "64", "--batch", "4", "--prefill", "2048", *options, "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["budget", path, *asked])
    runpy.run_module("benchmarks.budget", run_name="__main__")
    written = json.loads(report.read_text())
    steps = {step: {line["operation"]: line for line in written[step]} for step in ("decode 4", "prefill")}
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["engine", path, "single", "prefill128", "--quick", "--repeat", "1"])
    runpy.run_module("benchmarks.engine", run_name="__main__")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [one["workload"] for one in printed] == ["single", "prefill128"]
    assert all(one["of_limit"] > 0 for one in printed)
    return steps, printed


def decode_all(slots: int, pages: IntArray) -> StepBatch:
    """A step of one token of each sequence, at its position 20."""
    everyone, at = np.arange(slots, dtype=np.int32), np.full(slots, 20, dtype=np.int32)
    return StepBatch(
        tokens=np.full(slots, FROM_SLOT, dtype=np.int32), positions=at, cache_rows=pages[:, 1] * 16 + 4,
        sequence_starts=np.arange(slots + 1, dtype=np.int32), context_lengths=at + 1, page_tables=pages,
        slots=everyone, draws=make_draws(everyone, everyone, at + 1), drawn=slots,
    )  # fmt: skip
