"""A model that gives no numbers takes no jobs."""

from pathlib import Path

import numpy as np
import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import ModelFileError
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import open_model
from nightmill.worker.engine.probing import probe
from tests.support.ggufs import write_model
from tests.unit.engine.by_definition import VOCAB
from tests.unit.engine.scripted import ScriptedRunner, make_engine


def test_a_model_with_one_broken_token_serves() -> None:
    for poison in range(VOCAB):
        engine = make_engine(ScriptedRunner(poison=poison))
        probe(engine, VOCAB)
        assert not engine.has_work
        engine.check_integrity()


def test_a_damaged_file_is_named_when_the_engine_is_built(tmp_path: Path) -> None:
    norm = np.full(64, np.nan, dtype=np.float32)
    path = write_model(tmp_path / "model.gguf", tensors={"output_norm.weight": norm})
    settings = Settings(model=path, reference=True)
    with pytest.raises(
        ModelFileError,
        match=r"not a number for any of 4 plain prompts: its file is damaged, or .*--dtype bf16",
    ):
        build_engine(settings, open_model(settings))
