"""The model of `--draft`: what is refused, and an engine with one, whose texts are those without."""

from pathlib import Path

import pytest
from gguf import TokenType

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import SettingsError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.draft_model import open_draft_model
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import demo_model, open_model
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.engine.stats import EngineStats
from tests.support.engines import complete
from tests.support.family_cases import file_of
from tests.support.ggufs import byte_vocabulary, write_model
from tests.support.hybrid_cases import GPU_HYBRID_FILES

USUAL = Settings(model=demo_model(), reference=True, max_sequences=24, context=256, drafts="ngram")
REQUESTS = [
    Request(
        str(number), 1, tuple(range(100, 106 + number)),
        GenerationParams(max_tokens=24, temperature=number / 2, top_k=40 * number, ignore_eos=True),
        seed=number,
    )
    for number in range(3)
]  # fmt: skip


def run(settings: Settings) -> tuple[dict[str, Completion], EngineStats]:
    engine = build_engine(settings, open_model(settings))
    try:
        return complete(engine, REQUESTS), engine.stats
    finally:
        engine.close()


def test_a_model_guesses_what_its_equal_draws_at_any_temperature() -> None:
    plain, before = run(USUAL)
    drafted, stats = run(USUAL.model_copy(update={"draft": demo_model()}))
    assert drafted == plain
    assert stats.guessed_right > 0.8 * stats.guessed_tokens > 40
    assert stats.steps < before.steps / 2


def test_a_draft_model_without_drafts_is_refused() -> None:
    settings = USUAL.model_copy(update={"drafts": "off", "draft": demo_model()})
    with pytest.raises(SettingsError, match=r"--draft: .* add --drafts auto"):
        open_draft_model(settings, open_model(settings))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = file_of(tmp_path, *GPU_HYBRID_FILES["lfm2"])
    settings = USUAL.model_copy(update={"draft": other.path})
    with pytest.raises(SettingsError, match=r"has another vocabulary than the model: token \d+ is"):
        open_draft_model(settings, open_model(settings))


def padded(path: Path, tokens: int, *, kind: TokenType = TokenType.UNUSED) -> Path:
    """A model whose vocabulary has so many tokens more than the others' here."""
    own = byte_vocabulary([(f"[PAD{number}]", int(kind)) for number in range(tokens)])
    return write_model(path / f"{tokens}-{kind}.gguf", vocabulary=own)


@pytest.mark.parametrize("ours", [0, 9])
def test_tokens_for_padding_may_be_more_in_one_of_the_models(ours: int, tmp_path: Path) -> None:
    """What only one has is neither guessed nor read."""
    model, draft = padded(tmp_path, ours), padded(tmp_path, 9 - ours)
    settings = USUAL.model_copy(update={"model": model, "draft": draft})
    shared = len(byte_vocabulary().tokens)
    assert open_draft_model(settings, open_model(settings))[2] == shared
    drafted, _ = run(settings)
    plain, _ = run(settings.model_copy(update={"draft": None}))
    assert drafted == plain


def test_other_tokens_behind_the_last_are_refused(tmp_path: Path) -> None:
    settings = USUAL.model_copy(
        update={"model": padded(tmp_path, 0), "draft": padded(tmp_path, 2, kind=TokenType.NORMAL)}
    )
    with pytest.raises(SettingsError, match=r"token \d+ is '\[PAD0\]' there, and None in the model"):
        open_draft_model(settings, open_model(settings))


def test_a_draft_model_with_states_is_refused(tmp_path: Path) -> None:
    hybrid = file_of(tmp_path, *GPU_HYBRID_FILES["qwen35"]).path
    settings = USUAL.model_copy(update={"model": hybrid, "draft": hybrid})
    with pytest.raises(SettingsError, match="keeps states"):
        open_draft_model(settings, open_model(settings))
