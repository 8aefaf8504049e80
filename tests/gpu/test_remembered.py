"""Starts that take ways to multiply from an earlier one: nothing is timed, and no bit changes."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products import chooser
from nightmill.worker.runners.gpu.products.clock import KernelClock
from tests.support.cuda_runners import cuda_runner
from tests.support.engines import bits, complete, engine_of
from tests.support.ggufs import write_model


@pytest.mark.parametrize("weights", [WeightsFormat.ELEMENT, WeightsFormat.FILE])
def test_a_second_start_times_nothing_and_gives_the_same_bits(
    weights: WeightsFormat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chooser, "choices_file", lambda device, beside: tmp_path / "choices" / "gpu.json")
    monkeypatch.setattr("nightmill.worker.runners.gpu.products.clock._STEADY", 100.0)  # others use the GPU
    file = GgufFile.open(write_model(tmp_path / "model.gguf", width=512, heads=8, kv_heads=2, ffn=1024))
    timed: list[int] = []
    ranked = KernelClock.ranked

    def counted(clock: KernelClock, kernels: Sequence[Any], *rest: Any, **more: Any) -> list[int]:
        timed.append(len(kernels))
        return ranked(clock, kernels, *rest, **more)

    monkeypatch.setattr(KernelClock, "ranked", counted)
    params = GenerationParams.parse({"max_tokens": 20, "ignore_eos": True, "logprobs": 1})
    requests = [
        Request(
            str(n), 1, tuple(np.random.default_rng(n).integers(0, 256, 9 + 5 * n).tolist()), params, seed=n
        )
        for n in range(16)
    ]
    found = []
    for _ in range(2):
        sizes: dict[str, Any] = {"slots": 16, "kv_pages": 256, "context": 256, "max_tokens": 2048}
        precision = Precision(weights=weights)
        with closing(cuda_runner(file, read_spec(file), tune=True, precision=precision, **sizes)) as runner:
            assert runner._products is not None
            chosen = runner._products.tuned()
            found.append((chosen, bits(complete(engine_of(runner, 256), requests)), len(timed)))
    first, second = found
    assert first == second
    assert first[2] > 20
