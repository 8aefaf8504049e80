"""What the CUDA runner launches for a block that predicts further tokens, and the memory that it plans."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.runners.gpu.device.functions import Function
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.rows.predictor import GUESSES
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.hybrid_cases import GPU_HYBRID_FILES
from tests.unit.runners import test_predictors as predictors
from tests.unit.runners.recorded_cuda import RecordedDriver
from tests.unit.runners.recorded_steps import allocations

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

CONTEXT = 256
PRECISIONS = {
    "16bit": Precision(),
    "file": Precision(weights=WeightsFormat.FILE),
    "fp8": Precision(weights=WeightsFormat.FP8, kv=KvFormat.FP8),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_block_follows_the_draws_within_the_memory_that_is_planned(
    precision: str, hopper: RecordedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A prompt's last piece beside a drawn token: two sequences guess."""
    monkeypatch.setitem(predictors.CASES, "qwen35", GPU_HYBRID_FILES["qwen35"])
    file, taken, done = predictors.opened(tmp_path, "qwen35"), allocations(monkeypatch), list[str]()
    launch = Function.__call__

    def launched(function: Function, *arguments: Any, **more: Any) -> None:
        done.append(function.name)
        launch(function, *arguments, **more)

    sizes = {"slots": 9, "kv_pages": 64, "context": CONTEXT, "max_tokens": 128}
    plain = precision == "16bit"
    options = {"tune": plain, "graphs": plain, "precision": PRECISIONS[precision]}
    with closing(cuda_runner(file, read_spec(file), predicts=True, **sizes, **options)) as runner:
        assert runner.predicts
        plan = runner.memory
        planned = plan.weights + plan.workspace + plan.states.bytes + plan.cache
        assert 0 <= planned - sum(taken.values()) < 64 << 10
        monkeypatch.setattr(Function, "__call__", launched)
        text = np.arange(CONTEXT).tolist()
        chunks = [Chunk(1, text, 70, 1, drawn=True), Chunk(2, text, 0, 20)]
        runner.launch(Pages(4, CONTEXT // 16).batch(chunks, admit=True))
        assert runner.collect() is not None
    behind = done[done.index("choose_draws") :]
    assert "sample" in done[: done.index("choose_draws")]
    assert behind[:4] == ["choose_draws", "next_tokens", "embed", "pair_rows"]
    assert [name for name in behind if name in ("pair_rows", "qkv_rope_write", "sample", "go_on")][
        -1
    ] == "go_on"
    assert behind.count("sample") == behind.count("go_on") == behind.count("pair_rows") == GUESSES
