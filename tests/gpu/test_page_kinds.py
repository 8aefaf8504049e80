"""Pages by kind of layer on the GPU: texts do not depend on what goes behind a window, and who gets it."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.kv_cache import kinds_layout
from nightmill.worker.runners.gpu.precision import Precision
from tests.support.cuda_runners import cuda_runner
from tests.support.driving import generate
from tests.support.family_cases import GPU_FILES, file_of

CONTEXT = 480
WINDOWS = {"gemma3": 20, "gemma2": 33, "cohere2": 64}


@pytest.fixture(params=WINDOWS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> GgufFile:
    """A model with layers of both kinds, whose windows are shorter than most texts."""
    keys, like = GPU_FILES[request.param]
    return file_of(tmp_path, keys | {"attention.sliding_window": WINDOWS[request.param]}, like)


def requests(vocab: int) -> list[Request]:
    """Some begin alike, by more than a segment of any kind."""
    rng = np.random.default_rng(3)
    system = rng.integers(0, vocab, 200).tolist()
    made = []
    for number in range(12):
        own = rng.integers(0, vocab, 1 + 17 * number).tolist()
        params = GenerationParams(max_tokens=60 + 7 * number, temperature=0.7 * (number % 2))
        made.append(Request(f"j{number}", 1, (*system[: 200 * (number % 3 > 0)], *own), params, seed=number))
    return made


def test_a_text_does_not_depend_on_how_pages_of_windows_change_hands(file: GgufFile) -> None:
    spec = read_spec(file)
    layout = kinds_layout(spec)
    assert layout is not None and len(layout.kinds) == 2
    whole = layout.pages_for(CONTEXT)
    precision = Precision()
    options: dict[str, Any] = {
        "context": CONTEXT, "max_tokens": 1024, "tune": False, "precision": precision,
    }  # fmt: skip
    asked = requests(spec.vocab)
    with closing(cuda_runner(file, spec, slots=1, kv_pages=2 * whole, **options)) as runner:
        alone: dict[str, tuple[int, ...]] = {}
        for one in asked:
            alone |= generate(runner, [one], context=CONTEXT, token_budget=1024)
    assert len(set(alone.values())) == len(asked)
    for slots, pages, budget in ((12, 12 * whole, 1024), (12, whole + 20, 200), (5, 3 * whole, 64)):
        with closing(cuda_runner(file, spec, slots=slots, kv_pages=pages, **options)) as runner:
            assert generate(runner, asked, context=CONTEXT, token_budget=budget) == alone
