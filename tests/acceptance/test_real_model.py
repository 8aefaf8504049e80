"""A real model on the reference runner: prompts have llama.cpp's token ids, and the same texts follow."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import LoadedModel, load_model
from tests.support.real_model import expected_rows, hold_to_llama_cpp, real_model


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings(model=real_model(), reference=True, max_sequences=32, context=512)


@pytest.fixture(scope="module")
def model(settings: Settings) -> Iterator[LoadedModel]:
    with closing(load_model(settings)) as loaded:
        yield loaded


def test_prompts_have_the_token_ids_of_llama_cpp(model: LoadedModel) -> None:
    for row in expected_rows():
        assert list(model.encode(row.get("prompt") or row["messages"])) == row["prompt_ids"]


@pytest.mark.parametrize(
    "every_sixth",
    [pytest.param(True, id="a sixth"), pytest.param(False, id="the others", marks=pytest.mark.slow)],
)
def test_greedy_texts_are_those_of_llama_cpp(
    every_sixth: bool, settings: Settings, model: LoadedModel
) -> None:
    rows = [row for number, row in enumerate(expected_rows()) if (number % 6 == 0) is every_sixth]
    with closing(build_engine(settings, model)) as engine:
        hold_to_llama_cpp(engine, model, rows)
