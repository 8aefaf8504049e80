"""Shared by the tests of `worker.model`: tiny models, and real vocabularies where they are at hand."""

import os
from functools import cache
from pathlib import Path

import pytest

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.ggufs import write_model

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def vocab_dir() -> Path:
    """llama.cpp's vocabulary-only GGUF files with texts (.inp) and the ids expected for them (.out)."""
    named = os.environ.get("NIGHTMILL_TEST_VOCAB")
    path = Path(named) if named else REPOSITORY.parent / "shared" / "vocab"
    if not (path / "ggml-vocab-qwen2.gguf").exists():
        pytest.skip(f"no vocabularies in {path}; set NIGHTMILL_TEST_VOCAB to llama.cpp's models directory")
    return path


@cache
def real_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a real vocabulary, built once a session: it takes a second."""
    with GgufFile.open(path) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
