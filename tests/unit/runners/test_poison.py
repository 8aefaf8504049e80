"""One token of a model cannot be computed with: on real arithmetic, others keep their bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import FROM_SLOT, NOT_A_NUMBER, Admission, StepBatch, make_draws
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.engines import complete
from tests.support.ggufs import write_model
from tests.support.poisoned import EMBEDDING, POISON, forty, note_acquittals


class Numbers:
    """Writes tokens as numbers."""

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    @property
    def whole(self) -> bool:
        return True

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufFile, GgufFile]:
    """The same model twice, with a head of its own; in the second, a token's embedding is not a number."""
    directory = tmp_path_factory.mktemp("models")
    clean = GgufFile.open(write_model(directory / "clean.gguf", tied=False))
    table = np.array(clean.array(EMBEDDING), dtype=np.float32)
    table[POISON, 3] = np.nan
    poisoned = write_model(directory / "poisoned.gguf", tied=False, tensors={EMBEDDING: table})
    return clean, GgufFile.open(poisoned)


def generate(
    file: GgufFile, requests: list[Request], *, depth: int, pages: int, sharing: bool
) -> tuple[dict[str, Completion], EngineStats]:
    runner = ReferenceRunner(file, read_spec(file), kv_pages=pages, slots=9, depth=depth, page_size=4)
    engine = Engine(
        runner,
        Detokenizer(text_stream=Numbers, eos_ids=frozenset()),
        EngineSizes(context_length=256, max_sequences=9, token_budget=150),
        prefix_sharing=sharing,
    )
    done = complete(engine, requests)
    runner.close()
    return done, engine.stats


@pytest.fixture(scope="module")
def undisturbed(files: tuple[GgufFile, GgufFile]) -> dict[str, Completion]:
    """What `forty` become without the poison in the model."""
    return generate(files[0], forty(), depth=1, pages=800, sharing=False)[0]


def cut_at_the_poison(clean: Completion, request: Request) -> Completion:
    """What the poison leaves of a completion: all of it, or what was drawn up to the poison."""
    drawn = clean.token_ids
    if POISON in request.prompt_ids:
        drawn = ()
    elif POISON in drawn[:-1]:
        drawn = drawn[: drawn.index(POISON) + 1]
    else:
        return clean
    text = "".join(f"{token} " for token in drawn)
    return replace(
        clean, token_ids=drawn, text=text, completion_tokens=len(drawn), stop_reason=StopReason.ERROR
    )


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("pages", [34, 800])  # 34: sequences give way to each other, pages are used again
@pytest.mark.parametrize("sharing", [True, False])
def test_of_forty_jobs_those_with_the_poison_fail_and_the_others_keep_their_bits(
    files: tuple[GgufFile, GgufFile], undisturbed: dict[str, Completion], depth: int, pages: int,
    sharing: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    acquitted = note_acquittals(monkeypatch)
    requests = forty()
    done, stats = generate(files[1], requests, depth=depth, pages=pages, sharing=sharing)
    assert done.keys() == undisturbed.keys()
    failed = [one for one in done.values() if one.stop_reason is StopReason.ERROR]
    assert 9 <= len(failed) < 18
    for request in requests:
        left = cut_at_the_poison(undisturbed[request.job_id], request)
        assert replace(done[request.job_id], error=None) == left
    for one in failed:
        assert one.error is not None
        assert "not a number" in one.error
    assert (stats.preemptions > 0) == (pages < 800)
    assert any(acquitted) == sharing
    assert acquitted.count(False) == len(failed)
    assert stats.free_pages == pages


def test_damaged_weights_are_an_error_of_every_job_not_a_text(
    files: tuple[GgufFile, GgufFile], tmp_path: Path
) -> None:
    norm = np.full(64, np.nan, dtype=np.float32)
    file = GgufFile.open(write_model(tmp_path / "damaged.gguf", tensors={"output_norm.weight": norm}))
    done, _ = generate(file, forty(poison=False), depth=3, pages=100, sharing=True)
    assert len(done) == 40
    assert {(one.stop_reason, one.token_ids, one.text) for one in done.values()} == {
        (StopReason.ERROR, (), "")
    }


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def decoding(tokens: tuple[int, ...], position: int, admitted: tuple[Admission, ...] = ()) -> StepBatch:
    """One token each of sequences in slots 0, 1, ..., with a page each."""
    slots = np.arange(len(tokens), dtype=np.int32)
    places = np.full(len(tokens), position, dtype=np.int32)
    return StepBatch(
        tokens=ints(*tokens), positions=places, cache_rows=slots * 16 + places,
        sequence_starts=np.arange(len(tokens) + 1, dtype=np.int32), context_lengths=places + 1,
        page_tables=slots[:, None], slots=slots, draws=make_draws(slots, slots, places + 1),
        drawn=len(tokens) if position else 0, admissions=admitted,
    )  # fmt: skip


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_a_slot_goes_on_as_if_token_0_had_been_drawn_unseen(
    files: tuple[GgufFile, GgufFile], penalty: float
) -> None:
    """So steps that run ahead are safe, and the slot's next sequence finds nothing of it."""
    params = GenerationParams(temperature=0.0, repetition_penalty=penalty)
    drawn = []
    for file in files:
        runner = ReferenceRunner(file, read_spec(file), kv_pages=2, slots=2, depth=4)
        admitted = (Admission(0, (7,), params, 1), Admission(1, (POISON,), params, 2))
        runner.launch(decoding((7, POISON), 0, admitted))
        runner.launch(decoding((FROM_SLOT, FROM_SLOT), 1))
        assert runner._last_token[1] == (0 if file is files[1] else runner._last_token[1])
        seen = runner._seen[1]
        assert (seen is None) == (penalty == 1.0)
        if seen is not None and file is files[1]:
            assert np.flatnonzero(seen).tolist() == [POISON]
        runner.launch(decoding((8, 8), 0, tuple(Admission(slot, (8,), params, 3) for slot in (0, 1))))
        results = [runner.collect() for _ in range(3)]
        drawn.append([one.tokens.tolist() for one in results if one is not None])
    clean, poisoned = drawn
    assert [row[1] for row in poisoned[:2]] == [NOT_A_NUMBER] * 2
    assert [row[0] for row in poisoned] == [row[0] for row in clean]
    assert poisoned[2] == [clean[2][0]] * 2
