"""A small model guesses for a larger one on the same GPU (`--draft`): texts are those without, to the bit."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.draft_model import DraftModel
from nightmill.worker.engine.drafting import MOST_GUESSES, Drafts
from nightmill.worker.engine.request import Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.cuda_runners import cuda_runner
from tests.support.engines import Bits, bits, complete, engine_of
from tests.support.ggufs import write_model

CONTEXT, ANSWER = 512, 40
WISHES = ({"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 20, "logprobs": 3}, {"top_p": 0.8})
LARGE = {"architecture": "qwen2", "width": 448, "heads": 7, "kv_heads": 1, "head_dim": 64, "ffn": 384}
SMALL = {"architecture": "llama", "width": 64, "heads": 4, "kv_heads": 2, "seed": 9}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    """A model, and one that is a stranger to it."""
    path = tmp_path_factory.mktemp("models")
    return {
        name: GgufFile.open(write_model(path / f"{name}.gguf", context_length=CONTEXT, **sizes))
        for name, sizes in (("large", LARGE), ("small", SMALL))
    }


def runner_of(file: GgufFile, slots: int) -> CudaRunner:
    return cuda_runner(
        file, read_spec(file), slots=slots, kv_pages=slots * CONTEXT // 16, context=CONTEXT, max_tokens=1024,
        depth=3, tune=False,
    )  # fmt: skip


def asked() -> list[Request]:
    """Texts of 1 to 360 tokens, some of which begin alike; greedy, drawn, with log-probabilities."""
    beginning = np.random.default_rng(1).integers(0, 256, 160).tolist()
    found = []
    for number, length in enumerate((1, 15, 16, 17, 70, 200, 330, 40, 41, 128)):
        own = np.random.default_rng(number).integers(0, 256, length).tolist()
        prompt = (*beginning[: 80 * (number % 3)], *own)
        params = GenerationParams.parse({"max_tokens": ANSWER, "ignore_eos": True} | WISHES[number % 4])
        found.append(Request(str(number), 1, prompt, params, seed=number))
    return found


def run(
    model: CudaRunner, draft: GgufFile | None, groups: tuple[list[Request], ...]
) -> tuple[Bits, EngineStats]:
    """What becomes of groups of requests, one after the other, on one engine."""
    drafts = Drafts.OFF if draft is None else Drafts.NGRAM
    engine, found = engine_of(model, CONTEXT, drafts=drafts), Bits()
    if draft is None:
        return bits(complete(engine, groups[0])), engine.stats
    with closing(DraftModel(runner_of(draft, 16), context=CONTEXT, token_budget=1024)) as guesser:
        engine.guess_by(guesser)
        for group in groups:
            found |= bits(complete(engine, group))
        return found, engine.stats


@pytest.fixture(scope="module")
def model(files: dict[str, GgufFile]) -> Iterator[CudaRunner]:
    with closing(runner_of(files["large"], 40)) as runner:
        yield runner


@pytest.fixture(scope="module")
def plain(model: CudaRunner) -> Bits:
    return run(model, None, (asked(),))[0]


def test_its_equal_guesses_well(model: CudaRunner, files: dict[str, GgufFile], plain: Bits) -> None:
    drafted, stats = run(model, files["large"], (asked()[:6], asked()[6:]))
    assert drafted == plain
    assert stats.guessed_tokens > 300
    # In vain are guesses behind a text's end alone, of a step each.
    assert stats.guessed_tokens - stats.guessed_right <= MOST_GUESSES * len(asked())


def test_a_stranger_guesses_in_vain(model: CudaRunner, files: dict[str, GgufFile], plain: Bits) -> None:
    drafted, stats = run(model, files["small"], (asked(),))
    assert drafted == plain
    assert stats.guessed_tokens > 90
