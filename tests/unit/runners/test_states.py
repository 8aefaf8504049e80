"""Texts of models with states on the reference runner: the same bits under every schedule.

A slot that nobody has, and a snapshot that nobody can find, are filled with NaN after each step.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import STATE_CHUNK
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.engines import NoText
from tests.support.ggufs import spec_tensors, write_file, write_spec
from tests.support.poisoned import EMBEDDING
from tests.support.specs import HYBRIDS
from tests.support.true_guesses import guess_truly

KINDS = ["a gated delta net", "Mamba-2", "a short convolution", "one part in a layer"]
BEGINNING = np.random.default_rng(1).integers(0, 400, 160).tolist()
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.9, "repetition_penalty": 1.2}, {"top_k": 20, "logprobs": 3},
]  # fmt: skip


class Schedule:
    """An engine that computes requests under limits, and what became of it."""

    def __init__(
        self, file: GgufFile, kind: str, *, slots: int, pages: int = 400, budget: int = 4000, depth: int = 1,
        sharing: bool = True, drafts: bool = False,
    ) -> None:  # fmt: skip
        self.runner = ReferenceRunner(file, HYBRIDS[kind], kv_pages=pages, slots=slots, depth=depth)
        self.engine = Engine(
            self.runner,
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(context_length=400, max_sequences=slots, token_budget=budget),
            prefix_sharing=sharing,
            drafts=Drafts.NGRAM if drafts else Drafts.OFF,
        )

    def complete(self, requests: list[Request], steps_between: int = 0) -> dict[str, Completion]:
        """What becomes of requests, one of which comes every so many steps; 0: all come at once."""
        coming, done = list(requests), {}
        while coming or self.engine.has_work:
            for _ in range(1 if steps_between else len(coming)):
                if coming:
                    self.engine.submit(coming.pop(0))
            for _ in range(max(1, steps_between)):
                done |= {one.job_id: one for one in self.engine.step()}
                self.engine.check_integrity()
                self.poison()
        return done

    def poison(self) -> None:
        """Fill what nobody may read with NaN."""
        scheduler = self.engine._scheduler
        for slot in scheduler._holders._free_slots:
            self.runner.states.fill(slot, np.nan)
        if scheduler._sharing is not None:
            for place in scheduler._sharing._snapshots._free:
                self.runner.states.fill(self.runner.slots + place, np.nan)
        if scheduler.drafter is not None and scheduler.drafter.copies is not None:
            for place in scheduler.drafter.copies._free:
                self.runner.states.fill(self.runner.slots + place, np.nan)


def make_requests(count: int, *, tokens: int = 12) -> list[Request]:
    """Prompts that begin alike, for whole chunks, parts of one or not at all; three are equal."""
    requests = []
    for n in range(count):
        rng = np.random.default_rng(n)
        own = rng.integers(0, 400, int(rng.integers(1, 90))).tolist()
        prompt = (*BEGINNING[: (0, 70, 128, 160)[n % 4]], *own)
        if n % 5 == 4:
            prompt = requests[-1].prompt_ids
        params = GenerationParams.parse({"max_tokens": tokens, "ignore_eos": True} | PARAMS[n % 3])
        requests.append(Request(f"j{n}", 1, prompt, params, seed=n))
    return requests


def bits(done: dict[str, Completion]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """What two schedules must have in common."""
    return {
        job: (one.token_ids, b"" if one.logprobs is None else one.logprobs.records)
        for job, one in done.items()
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    folder = tmp_path_factory.mktemp("models")
    return {
        kind: GgufFile.open(write_spec(folder / f"{n}.gguf", HYBRIDS[kind])) for n, kind in enumerate(KINDS)
    }


@pytest.fixture(scope="module")
def plain(files: dict[str, GgufFile]) -> dict[str, dict[str, Completion]]:
    """Each request alone, its prompt in one piece."""
    return {
        kind: {
            one.job_id: Schedule(file, kind, slots=1, sharing=False).complete([one])[one.job_id]
            for one in make_requests(12)
        }
        for kind, file in files.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.integers(1, 12), pages=st.integers(17, 60), spare=st.sampled_from([0, 1, 40, 200]),
    depth=st.integers(1, 3), sharing=st.booleans(), steps_between=st.integers(0, 4),
    order=st.permutations(range(12)),
)  # fmt: skip
def test_under_every_schedule_texts_have_the_bits_that_they_have_alone(
    kind: str, slots: int, pages: int, spare: int, depth: int, sharing: bool, steps_between: int,
    order: list[int], files: dict[str, GgufFile], plain: dict[str, dict[str, Completion]],
) -> None:  # fmt: skip
    schedule = Schedule(
        files[kind], kind, slots=slots, pages=pages, budget=slots - 1 + STATE_CHUNK + spare, depth=depth,
        sharing=sharing,
    )  # fmt: skip
    requests = make_requests(12)
    done = schedule.complete([requests[n] for n in order], steps_between)
    assert bits(done) == bits(plain[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "pages"), [(40, 400), (14, 40)], ids=["room for all", "some give way"])
def test_drafts_change_no_bit(
    kind: str, slots: int, pages: int, monkeypatch: pytest.MonkeyPatch, files: dict[str, GgufFile],
    plain: dict[str, dict[str, Completion]],
) -> None:  # fmt: skip
    """States take back what wrong guesses went through; a row with a penalty is not guessed."""
    guess_truly(monkeypatch, {job: one.token_ids for job, one in plain[kind].items()}, vocab=400)
    schedule = Schedule(files[kind], kind, slots=slots, pages=pages, drafts=True, depth=2)
    done = schedule.complete(make_requests(12), 2 if slots == 14 else 0)
    assert bits(done) == bits(plain[kind])
    stats = schedule.engine.stats
    assert stats.guessed_tokens > stats.guessed_right > 15


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_beginning_is_computed_once_and_a_text_goes_on_from_saved_tokens(
    kind: str, files: dict[str, GgufFile], plain: dict[str, dict[str, Completion]]
) -> None:
    schedule = Schedule(files[kind], kind, slots=12, pages=60, budget=200, depth=3)
    alone = plain[kind]
    resumed = [
        replace(one, generated_ids=alone[one.job_id].token_ids[: n % 12])
        for n, one in enumerate(make_requests(12))
        if one.params.logprobs is None
    ]
    done = schedule.complete(resumed)
    assert {job: one.token_ids for job, one in done.items()} == {
        one.job_id: alone[one.job_id].token_ids for one in resumed
    }
    assert schedule.engine.stats.shared_tokens >= 3 * STATE_CHUNK
    assert schedule.engine.stats.resumed_tokens > 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [24, 400])
def test_a_token_that_cannot_be_computed_fails_its_own_texts_alone(
    kind: str, pages: int, files: dict[str, GgufFile], plain: dict[str, dict[str, Completion]], tmp_path: Path
) -> None:
    """It is in the middle of a chunk, in a common beginning and behind one; slots are used again."""
    tensors = spec_tensors(HYBRIDS[kind])
    poison = next(
        token for token in range(400) if all(token not in one.prompt_ids for one in make_requests(12))
    )
    tensors[EMBEDDING][poison, 3] = np.nan
    file = GgufFile.open(write_file(tmp_path / "poisoned.gguf", "test", {}, tensors))
    good = make_requests(12)
    bad = []
    for n, one in enumerate(good[::3]):
        prompt = list(one.prompt_ids)
        prompt.insert((100, len(prompt), 0, 70)[n], poison)
        bad.append(replace(one, job_id=f"bad{n}", prompt_ids=tuple(prompt)))
    requests = [one for pair in zip(bad * 3, good, strict=False) for one in pair]
    done = Schedule(file, kind, slots=3, pages=pages, budget=130, depth=3).complete(requests)
    failed = {job for job, one in done.items() if one.stop_reason is StopReason.ERROR}
    drew = {one.job_id for one in good if poison in plain[kind][one.job_id].token_ids[:-1]}
    assert failed == {one.job_id for one in bad} | drew
    kept = {job: one for job, one in done.items() if job not in failed}
    assert bits(kept) == {job: one for job, one in bits(plain[kind]).items() if job in kept}
    assert len(kept) > 6
