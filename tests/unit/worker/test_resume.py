"""Which saved tokens may be gone on from."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from nightmill.jobs.sql.partials import SavedTokens
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.service.resume import fingerprint, tokens_to_resume
from tests.support.ggufs import write_model
from tests.unit.engine.scripted import ARITHMETIC


def digest(path: Path) -> str:
    with GgufFile.open(path) as file:
        return file.digest()


def test_fingerprints_differ_where_a_part_of_the_arithmetic_or_the_prompt_does() -> None:
    others = [replace(ARITHMETIC, **{part.name: "another"}) for part in fields(ARITHMETIC)]
    prompts = [(1, 2), (1, 3), (1,), (), (258,)]
    prints = {fingerprint(one, (1, 2)) for one in others} | {fingerprint(ARITHMETIC, ids) for ids in prompts}
    assert len(prints) == len(others) + len(prompts)
    assert {len(one) for one in prints} == {64}
    assert fingerprint(ARITHMETIC, (1, 2)) == fingerprint(replace(ARITHMETIC), [1, 2])


def test_only_tokens_with_the_right_fingerprint_are_used() -> None:
    saved = SavedTokens("j", 1, "right", (4, 5))
    assert tokens_to_resume(saved, "right") == (4, 5)
    assert tokens_to_resume(saved, "wrong") == ()
    assert tokens_to_resume(None, "right") == ()


def test_a_models_digest_is_that_of_its_content_not_of_its_name(tmp_path: Path) -> None:
    first = digest(write_model(tmp_path / "a.gguf", seed=1))
    assert digest(write_model(tmp_path / "b.gguf", seed=1)) == first
    assert digest(write_model(tmp_path / "a.gguf", seed=2)) != first
    renamed = digest(write_model(tmp_path / "a.gguf", seed=1, metadata={"general.name": "other"}))
    assert renamed != first
    norm = np.ones(64, dtype=np.float32)
    changed = [
        digest(write_model(tmp_path / f"{n}.gguf", seed=1, tensors={"output_norm.weight": norm + n}))
        for n in (0, 1)
    ]
    assert len({first, *changed}) == 3
