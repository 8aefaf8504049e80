"""The launches of models whose layers hold states, on a driver that computes nothing."""

from contextlib import closing
from pathlib import Path

import pytest

from nightmill.worker.model.families import read_spec
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import Chunk, Pages
from tests.support.family_cases import file_of
from tests.support.hybrid_cases import GPU_HYBRID_FILES
from tests.unit.runners.recorded_cuda import RecordedDriver

pytestmark = pytest.mark.heavy  # kernels are compiled where nvcc is

CONTEXT = 256


@pytest.mark.parametrize("name", GPU_HYBRID_FILES)
def test_every_family_is_launched_as_it_was_compiled(
    driver: RecordedDriver,
    name: str,
    tmp_path: Path,
) -> None:
    file = file_of(tmp_path, *GPU_HYBRID_FILES[name])
    tokens, pages = [1] * CONTEXT, Pages(2, CONTEXT // 16)
    steps = [
        [Chunk(0, tokens, 0, 64), Chunk(1, tokens, 0, 9)],
        [Chunk(1, tokens, 9, 1, 1, True), Chunk(0, tokens, 64, 30)],
        [Chunk(1, tokens, 10, 1, 1, True), Chunk(0, tokens, 94, 1, 1, True)],
    ]
    options = {"slots": 2, "context": CONTEXT, "kv_pages": 16, "max_tokens": 128}
    with closing(cuda_runner(file, read_spec(file), **options)) as runner:  # type: ignore[arg-type]
        for step in steps:
            runner.launch(pages.batch(step, admit=step is steps[0]))
            assert runner.collect() is not None
    assert driver.launches.keys() - {"library"} <= driver.checked
