"""A small model guesses for a larger one on the same GPU (`--draft`): texts are those without, to the bit."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import open_model
from nightmill.worker.engine.request import Request
from nightmill.worker.engine.stats import EngineStats
from tests.support.cuda_runners import ON_GPU
from tests.support.engines import Bits, bits, complete
from tests.support.ggufs import write_model

CONTEXT, ANSWER = 512, 40
WISHES = ({"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 20, "logprobs": 3}, {"top_p": 0.8})


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A model with weights as in its file."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    sizes = {"width": 448, "heads": 7, "kv_heads": 1, "head_dim": 64, "ffn": 384, "layers": 3}
    model = write_model(path, kind=GGMLQuantizationType.Q8_0, context_length=CONTEXT, **sizes)
    return Settings(
        model=model, weights="file", max_sequences=40, context=CONTEXT, gpu_memory=2 << 30, **ON_GPU
    )


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


def run(settings: Settings, *groups: list[Request]) -> tuple[Bits, EngineStats]:
    """What becomes of groups of requests, one after the other, on one engine."""
    found: Bits = {}
    with closing(build_engine(settings, open_model(settings))) as engine:
        for group in groups:
            found |= bits(complete(engine, group))
        return found, engine.stats


@pytest.fixture(scope="module")
def plain(settings: Settings) -> Bits:
    return run(settings, asked())[0]


def test_its_equal_in_sixteen_bits_guesses_well(settings: Settings, plain: Bits) -> None:
    drafted, stats = run(
        settings.model_copy(update={"drafts": "ngram", "draft": settings.model}), asked()[:6], asked()[6:]
    )
    assert drafted == plain
    assert stats.guessed_right > 0.5 * stats.guessed_tokens > 100


def test_a_stranger_guesses_in_vain(settings: Settings, plain: Bits, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small.gguf", seed=9, width=64, context_length=CONTEXT)
    drafted, stats = run(settings.model_copy(update={"drafts": "ngram", "draft": small}), asked())
    assert drafted == plain
    assert stats.guessed_tokens > 100
