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
from nightmill.worker.runners.gpu.products import chooser, clock
from tests.support.cuda_runners import cuda_runner, need_fp8
from tests.support.engines import bits, complete, engine_of
from tests.support.family_models import Heads, Size
from tests.support.quantised_models import Shape, write

CONTEXT = 256


@pytest.mark.parametrize(
    "weights", [WeightsFormat.ELEMENT, WeightsFormat.FILE, WeightsFormat.FP8], ids=lambda one: one.value
)
def test_a_second_start_times_nothing_and_gives_the_same_bits(
    weights: WeightsFormat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also in steps of sizes that nothing is timed for: more rows than sequences, and fewer than many."""
    if weights is WeightsFormat.FP8:
        need_fp8()
    monkeypatch.setattr(chooser, "choices_file", lambda device, beside: tmp_path / "choices" / "gpu.json")
    monkeypatch.setattr(clock, "_STEADY", 100.0)  # others use the GPU
    size = Size(layers=2, vocab=603, context=512, heads=Heads(8, 2, 64), width=512, ffn=1024)
    file = GgufFile.open(write(tmp_path / "model.gguf", Shape(size), "Q4_K_M", pool_bytes=1 << 20))
    timed: list[int] = []
    ranked = clock.KernelClock.ranked

    def counted(timer: clock.KernelClock, kernels: Sequence[Any], *rest: Any, **more: Any) -> list[int]:
        timed.append(len(kernels))
        return ranked(timer, kernels, *rest, **more)

    monkeypatch.setattr(clock.KernelClock, "ranked", counted)
    params = GenerationParams.parse({"max_tokens": 20, "ignore_eos": True, "logprobs": 1})
    requests = [
        Request(
            str(n), 1, tuple(np.random.default_rng(n).integers(0, 603, 9 + 5 * n).tolist()), params, seed=n
        )
        for n in range(16)
    ]
    found = []
    for _ in range(2):
        sizes: dict[str, Any] = {"slots": 16, "kv_pages": 256, "context": CONTEXT, "max_tokens": 2048}
        precision = Precision(weights=weights)
        with closing(cuda_runner(file, read_spec(file), tune=True, precision=precision, **sizes)) as runner:
            assert runner._products is not None
            chosen = runner._products.tuned()
            texts = [
                bits(complete(engine_of(runner, CONTEXT, budget=budget), requests[:count]))
                for count, budget in ((16, 1000), (16, 200), (3, 40))
            ]
            found.append((chosen, texts, len(timed)))
    first, second = found
    assert first == second
    assert first[2] > 20
    assert first[1][0] == first[1][1], "a text hangs on no size of a step"
