"""A small model guesses for a larger one (`--draft`), both by the CUDA runner, whole on the host."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.draft_model import DraftModel
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.request import Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from tests.support.engines import Bits, bits, complete, engine_of
from tests.support.ggufs import write_model
from tests.unit.runners.host_runner import host_runner, run_on_host

pytestmark = pytest.mark.heavy

CONTEXT = 96
WISHES = ({"temperature": 0.0}, {"temperature": 0.9, "logprobs": 3}, {"top_k": 20})


def asked() -> list[Request]:
    """Texts that begin alike or not; greedy, drawn, with log-probabilities."""
    beginning = np.random.default_rng(1).integers(0, 256, 33).tolist()
    found = []
    for number, length in enumerate((1, 15, 3)):
        own = np.random.default_rng(number).integers(0, 256, length).tolist()
        prompt = (*beginning[: 16 * number], *own)
        params = GenerationParams.parse({"max_tokens": 12, "ignore_eos": True} | WISHES[number])
        found.append(Request(str(number), 1, prompt, params, seed=number))
    return found


def run(file: GgufFile, draft: GgufFile | None) -> tuple[Bits, EngineStats]:
    """What becomes of the requests; drafts are as NumPy's runner has them, of rows with logprobs, too."""
    runner = host_runner(file, read_spec(file), slots=16, context=CONTEXT, kv_pages=96)
    drafts = Drafts.OFF if draft is None else Drafts.NGRAM
    with closing(engine_of(runner, CONTEXT, budget=64, drafts=drafts)) as engine:
        if draft is not None:
            own = host_runner(draft, read_spec(draft), slots=16, context=CONTEXT, kv_pages=96)
            engine.guess_by(DraftModel(own, context=CONTEXT, token_budget=64))
        return bits(complete(engine, asked())), engine.stats


def test_texts_are_those_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its equal guesses well, at any temperature; a stranger in vain."""
    launched = run_on_host(monkeypatch, tmp_path)
    sizes = {"context_length": CONTEXT, "width": 64, "heads": 4, "kv_heads": 2, "layers": 1}
    file, stranger = (
        GgufFile.open(write_model(tmp_path / f"{seed}.gguf", seed=seed, **sizes)) for seed in (0, 9)
    )
    plain, before = run(file, None)
    drafted, stats = run(file, file)
    assert drafted == plain
    assert stats.guessed_right > 0.9 * stats.guessed_tokens > 20
    assert stats.steps < 0.7 * before.steps
    drafted, stats = run(file, stranger)
    assert drafted == plain
    assert stats.guessed_tokens > 20
    assert {"decode_attention_any", "gather_rows"} <= launched
