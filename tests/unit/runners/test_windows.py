"""Models of layers with windows, whose pages go while a text grows: the bits are those of a text alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.reference import ReferenceRunner
from nightmill.worker.runners.reference.kv_cache import reference_layout
from tests.support.engines import NoText
from tests.support.ggufs import write_spec
from tests.support.specs import GEMMAS, VARIANTS

SHARED = "layers that read others' keys"
SPECS = {"window": VARIANTS["window"], "both": VARIANTS["window, then all"], SHARED: GEMMAS[SHARED]}
SYSTEM = np.random.default_rng(5).integers(0, 300, 50).tolist()
CONTEXT = 140
REQUESTS = 6


def requests() -> list[Request]:
    """Some begin alike; answers are longer than the windows."""
    made = []
    for number in range(REQUESTS):
        rng = np.random.default_rng(number)
        own = rng.integers(0, 300, 1 + 9 * number).tolist()
        prompt = SYSTEM[: (50, 33, 0)[number % 3]] + own
        params = GenerationParams(max_tokens=25 + 3 * number, temperature=0.8 * (number % 2))
        made.append(Request(f"j{number}", 1, tuple(prompt), params, seed=number))
    return made


def generate(
    runner: ReferenceRunner, asked: list[Request], *, budget: int, sharing: bool = True
) -> tuple[dict[str, tuple[int, ...]], int]:
    """What was drawn for each, and the most pages that were in use; audited at each step."""
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(
            context_length=CONTEXT, max_sequences=runner.slots, token_budget=max(budget, runner.slots)
        ),
        prefix_sharing=sharing,
    )  # fmt: skip
    for request in asked:
        engine.submit(request)
    drawn, most = {}, 0
    while engine.has_work:
        for completion in engine.step():
            assert completion.error is None
            drawn[completion.job_id] = completion.token_ids
        engine.check_integrity()
        most = max(most, engine.stats.pages - engine.stats.free_pages)
    assert engine.stats.free_pages == engine.stats.pages
    return drawn, most


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[GgufFile, dict[str, tuple[int, ...]]]]:
    """For each model its file, and what each request gets alone, with room for all of its tokens."""
    found = {}
    for name, spec in SPECS.items():
        path: Path = tmp_path_factory.mktemp("windows") / "model.gguf"
        file = GgufFile.open(write_spec(path, spec))
        runner = ReferenceRunner(file, spec, kv_pages=60, slots=1)
        found[name] = file, generate(runner, requests(), budget=512, sharing=False)[0]
    return found


@settings(max_examples=6, deadline=None)
@given(
    name=st.sampled_from(sorted(SPECS)), slots=st.integers(2, REQUESTS),
    budget=st.sampled_from([12, 40, 300]), spare=st.integers(0, 30), depth=st.integers(1, 3),
    page_size=st.sampled_from([4, 16]), sharing=st.booleans(), order=st.permutations(range(REQUESTS)),
)  # fmt: skip
def test_any_schedule_gives_the_tokens_of_a_text_alone(
    alone: dict[str, tuple[GgufFile, dict[str, tuple[int, ...]]]], name: str, slots: int, budget: int,
    spare: int, depth: int, page_size: int, sharing: bool, order: list[int],
) -> None:  # fmt: skip
    file, expected = alone[name]
    spec = SPECS[name]
    pages = reference_layout(spec, page_size).pages_for(CONTEXT) + spare
    runner = ReferenceRunner(file, spec, kv_pages=pages, slots=slots, page_size=page_size, depth=depth)
    runner._cache.fill(np.nan)  # of what nobody has written, or sees, nothing may count
    asked = requests()
    drawn, _ = generate(runner, [asked[place] for place in order], budget=budget, sharing=sharing)
    assert drawn == expected


@pytest.mark.parametrize("name", SPECS)
def test_a_window_s_memory_does_not_grow_with_the_text(name: str, tmp_path: Path) -> None:
    spec: ModelSpec = SPECS[name]
    file = GgufFile.open(write_spec(tmp_path / "model.gguf", spec))
    layout = reference_layout(spec, 4)
    most = []
    for tokens in (40, 130):
        runner = ReferenceRunner(file, spec, kv_pages=120, slots=1, page_size=4)
        params = GenerationParams(max_tokens=tokens - 3, temperature=0.0)
        _, pages = generate(runner, [Request("j", 1, (1, 2, 3), params, seed=0)], budget=64)
        most.append(pages)
        assert pages <= layout.pages_at(tokens) + len(layout.kinds)
    whole = sum(
        -(-130 // kind.tokens) - -(-40 // kind.tokens) for kind in layout.kinds if kind.window is None
    )
    assert most[1] - most[0] <= whole + 1
    assert most[1] < layout.pages_for(130)
