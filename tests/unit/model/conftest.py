"""Shared by the tests of `worker.model`: tiny models, and real vocabularies where they are at hand."""

import os
from functools import cache
from pathlib import Path

import pytest

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.support.ggufs import write_model
from tests.support.needs import Need, missing

REPOSITORY = Path(__file__).parents[3]


def _downloaded() -> Path:
    """Where llama.cpp's vocabularies and chat templates are, if `make vocabularies` has fetched them."""
    places = [REPOSITORY / ".venv" / "vocabularies", REPOSITORY.parent / "shared" / "vocab"]
    if named := os.environ.get("NIGHTMILL_TEST_VOCAB"):
        return Path(named)
    return next((place for place in places if place.exists()), places[0])


DOWNLOADED = _downloaded()


@pytest.fixture(scope="session")
def vocab_dir() -> Path:
    """llama.cpp's vocabulary-only GGUF files with texts (.inp) and the ids expected for them (.out)."""
    if not (DOWNLOADED / "ggml-vocab-qwen2.gguf").exists():
        missing(Need.VOCABULARIES)
    return DOWNLOADED


@cache
def real_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a real vocabulary, built once a session: it takes a second."""
    with GgufFile.open(path) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
