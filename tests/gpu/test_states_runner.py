"""Layers that hold a state: computed as by the reference runner, with the same bits in any company.

Free slots and snapshots, and pages that nobody has, are filled with NaN after each step of an engine.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import STATE_CHUNK, Admission
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.comparing import compare_logits, nmse
from tests.support.cuda_runners import cuda_runner, need_fp8
from tests.support.driving import BLOCK, GREEDY, Chunk, Cuda, Pages, Reference, logits_of
from tests.support.engines import bits, engine_of, mixed_requests
from tests.support.family_cases import file_of
from tests.support.ggufs import half_tensors
from tests.support.hybrid_cases import GPU_HYBRID_FILES
from tests.support.true_guesses import guess_truly
from tests.tiny import FILES, expected, unpacked

CONTEXT, PROMPT, DECODED = 400, 200, 12
CHUNKS = {"whole": [200], "in pieces": [64, 128, 8], "with rows that do not draw": [128, 72]}
KINDS = ["qwen35", "lfm2", "granitehybrid", "nemotron_h"]


def halved(path: Path, name: str, **changes: Any) -> GgufFile:
    """A family's file with weights that half holds exactly: what the GPU has of them is all there is."""
    keys, like = GPU_HYBRID_FILES[name]
    like = replace(like, **changes)
    return file_of(path, keys, like, **half_tensors(like))


def logits_in(subject: Any, pages: Pages, chunks: list[Chunk]) -> npt.NDArray[np.float32]:
    """Logits of all rows that draw, of chunks one after the other, the first of a new sequence."""
    return np.concatenate(
        [logits_of(subject, pages, [chunk], admit=index == 0) for index, chunk in enumerate(chunks)]
    )


@pytest.mark.parametrize("prompt", CHUNKS)
@pytest.mark.parametrize("name", GPU_HYBRID_FILES)
def test_logits_agree_with_the_reference_runner(name: str, prompt: str, tmp_path: Path) -> None:
    """A prompt, then a few tokens one by one."""
    file = halved(tmp_path, name)
    spec = read_spec(file)
    text = np.random.default_rng(5).integers(0, spec.vocab, PROMPT + DECODED).tolist()
    chunks, start = [], 0
    for length in CHUNKS[prompt]:
        chunks.append(Chunk(0, text, start, length, 25 if "do not draw" in prompt else length))
        start += length
    chunks += [Chunk(0, text, PROMPT + index, 1, drawn=True) for index in range(DECODED)]
    blocks = CONTEXT // BLOCK
    cuda = Cuda(
        file, spec, slots=1, kv_pages=blocks, max_tokens=256, max_draws=256, context=CONTEXT, tune=False
    )
    with closing(cuda.runner):
        reference = Reference(file, spec, kv_pages=blocks, page_size=BLOCK, slots=1)
        ours, theirs = (logits_in(subject, Pages(1, blocks), chunks) for subject in (cuda, reference))
    compare_logits(ours, theirs).check()


PRECISIONS = {
    "BF16": (Precision(Element.BF16), 3e-3),
    "KV in FP8": (Precision(kv=KvFormat.FP8), 1e-2),
    "weights as in the file": (Precision(weights=WeightsFormat.FILE), 1e-4),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FILES)
def test_a_tiny_models_answers_are_those_of_two_engines(name: str, precision: str, tmp_path: Path) -> None:
    """In other precisions than half the distribution after each prompt is near that of transformers."""
    file = GgufFile.open(unpacked(name, tmp_path))
    spec, (numbers, kl) = read_spec(file), PRECISIONS[precision]
    check_spec(spec, numbers)
    answers = expected(name)["prompts"]
    blocks = 512 // BLOCK
    cuda = Cuda(
        file, spec, slots=1, kv_pages=blocks, max_tokens=512, context=512, tune=False, precision=numbers
    )
    with closing(cuda.runner):
        found = [
            logits_of(cuda, Pages(1, blocks), [Chunk(0, one["prompt"], 0, len(one["prompt"]))], admit=True)
            for one in answers
        ]
    theirs = np.array([one["logits_all"] for one in answers], dtype=np.float32)
    compare_logits(np.concatenate(found), theirs).check(mean_kl=kl, same_top=0.0)


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "granitehybrid", "nemotron_h"])
def test_weights_in_fp8_are_those_of_the_reference_runner(name: str, tmp_path: Path) -> None:
    """As near as rounding lets them be: what lies between two numbers of FP8 may become either."""
    need_fp8()
    file = halved(tmp_path, name)
    spec, blocks = read_spec(file), CONTEXT // BLOCK
    text = np.random.default_rng(5).integers(0, spec.vocab, PROMPT + DECODED).tolist()
    chunks = [Chunk(0, text, 0, PROMPT, PROMPT)]
    chunks += [Chunk(0, text, PROMPT + index, 1, drawn=True) for index in range(DECODED)]
    options: dict[str, Any] = {"kv_pages": blocks, "slots": 1}
    rounding, exact = (
        logits_in(Reference(file, spec, fp8=fp8, page_size=BLOCK, **options), Pages(1, blocks), chunks)
        for fp8 in (True, False)
    )
    options |= {"max_tokens": 256, "max_draws": 256, "context": CONTEXT, "tune": False}
    cuda = Cuda(file, spec, precision=Precision(weights=WeightsFormat.FP8), **options)
    with closing(cuda.runner):
        ours = logits_in(cuda, Pages(1, blocks), chunks)
    assert nmse(ours, rounding) < 0.5 * nmse(exact, rounding)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_tiny_models_texts_are_those_of_two_engines(name: str, graphs: bool, tmp_path: Path) -> None:
    file = GgufFile.open(unpacked(name, tmp_path))
    answers = expected(name)["prompts"]
    runner = cuda_runner(
        file, read_spec(file), slots=6, context=512, kv_pages=400, max_tokens=512, tune=False, graphs=graphs,
        depth=3,
    )  # fmt: skip
    with closing(runner):
        params = GenerationParams.parse({"temperature": 0.0, "max_tokens": 16, "ignore_eos": True})
        requests = [Request(f"j{n}", 1, tuple(one["prompt"]), params, 0) for n, one in enumerate(answers)]
        done = Schedule(runner, budget=300).complete(requests)
    assert [list(done[f"j{n}"].token_ids) for n in range(len(answers))] == [one["greedy"] for one in answers]
    assert all(one["greedy"] == one["llama_cpp_greedy"] for one in answers)


class Schedule:
    """An engine that computes requests under limits, and what became of it."""

    def __init__(
        self, runner: CudaRunner, *, budget: int = 1000, sequences: int | None = None, sharing: bool = True,
        drafts: bool = False,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.engine = engine_of(
            runner, CONTEXT, budget=budget, sequences=sequences, sharing=sharing,
            drafts=Drafts.NGRAM if drafts else Drafts.OFF,
        )  # fmt: skip

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
        """Fill the states that nobody may read with NaN, behind what is queued."""
        scheduler = self.engine._scheduler
        places = list(scheduler._holders._free_slots)
        if scheduler._sharing is not None:
            places += [self.runner.slots + place for place in scheduler._sharing._snapshots._free]
        if scheduler.drafter is not None and scheduler.drafter.copies is not None:
            places += [self.runner.slots + place for place in scheduler.drafter.copies._free]
        for place in places:
            for address, size in self.runner._states.arrays:
                self.runner.device.fill(address + place * size, 0xFF, size)


def make_requests(count: int, *, tokens: int = 12) -> list[Request]:
    """Prompts that begin alike, for whole chunks, parts of one or not at all; some are equal."""
    requests = mixed_requests(count, (0, 70, 128, 160), tokens=tokens)
    for n in range(4, count, 5):
        requests[n] = replace(requests[n], prompt_ids=requests[n - 1].prompt_ids)
    return requests


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def file(kind: str, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """A model with an untied head: a token whose embedding is NaN can be in a prompt, but is never drawn."""
    return halved(tmp_path_factory.mktemp("model"), kind, tied_head=False)


def runner_of(file: GgufFile, **options: Any) -> CudaRunner:
    defaults = {"slots": 12, "kv_pages": 400, "max_tokens": 1024, "tune": False, "context": CONTEXT}
    return cuda_runner(file, read_spec(file), **(defaults | options))


@pytest.fixture(scope="module")
def plain(file: GgufFile) -> Iterator[dict[str, Completion]]:
    """Each request alone, its prompt in one piece."""
    with closing(runner_of(file)) as runner:
        schedule = Schedule(runner, sharing=False)
        yield {one.job_id: schedule.complete([one])[one.job_id] for one in make_requests(24)}


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("pages", [40, 400])
@pytest.mark.parametrize(("sequences", "depth", "between"), [(12, 3, 0), (5, 1, 2), (3, 3, 1), (12, 2, 3)])
def test_under_every_schedule_texts_have_the_bits_that_they_have_alone(
    file: GgufFile, plain: dict[str, Completion], sequences: int, depth: int, between: int, pages: int,
    sharing: bool,
) -> None:  # fmt: skip
    """Sequences give way where pages are few, prompts come in pieces, and beginnings are snapshots."""
    with closing(runner_of(file, depth=depth, kv_pages=pages)) as runner:
        for budget in (sequences - 1 + STATE_CHUNK, 200, 1000):
            schedule = Schedule(runner, budget=budget, sequences=sequences, sharing=sharing)
            requests = make_requests(24)
            order = np.random.default_rng(budget).permutation(len(requests))
            done = schedule.complete([requests[n] for n in order], between)
            assert bits(done) == bits(plain)
            if sharing and pages == 400:
                assert schedule.engine.stats.shared_tokens >= 3 * STATE_CHUNK


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
def test_drafts_change_no_bit(
    file: GgufFile, plain: dict[str, Completion], monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """States take back what wrong guesses went through, log-probabilities too; alone, few and many.

    Once again with few pages and prompts in pieces, where sequences give way; a row with a penalty is not
    guessed.
    """
    guess_truly(monkeypatch, {job: one.token_ids for job, one in plain.items()}, vocab=256)
    asked = make_requests(24)
    with closing(runner_of(file, slots=64, depth=3, graphs=graphs)) as runner:
        for budget, between in ((1000, 0), (64 + STATE_CHUNK, 2)):
            schedule = Schedule(runner, drafts=True, budget=budget)
            for some in (asked[:8], asked[8:9], asked[9:24]):
                done = schedule.complete(some, between)
                assert bits(done) == {job: one for job, one in bits(plain).items() if job in done}
            assert schedule.engine.stats.guessed_tokens > schedule.engine.stats.guessed_right > 20
    with closing(runner_of(file, slots=24, depth=2, graphs=graphs, kv_pages=40)) as runner:
        schedule = Schedule(runner, drafts=True, budget=24 + STATE_CHUNK)
        assert bits(schedule.complete(asked, 1)) == bits(plain)
    assert schedule.engine.stats.guessed_right > 0


def test_a_text_goes_on_from_saved_tokens(file: GgufFile, plain: dict[str, Completion]) -> None:
    resumed = [
        replace(one, generated_ids=plain[one.job_id].token_ids[: n % 12])
        for n, one in enumerate(make_requests(24))
        if one.params.logprobs is None
    ]
    with closing(runner_of(file, depth=3)) as runner:
        schedule = Schedule(runner, budget=200)
        done = schedule.complete(resumed)
    assert {job: one.token_ids for job, one in done.items()} == {
        one.job_id: plain[one.job_id].token_ids for one in resumed
    }
    assert schedule.engine.stats.resumed_tokens > 20


def test_a_token_that_cannot_be_computed_fails_its_own_texts_alone(
    file: GgufFile, plain: dict[str, Completion]
) -> None:
    """It is in the middle of a chunk, in a common beginning and behind one; slots are used again."""
    good = make_requests(24)
    used = {token for one in good for token in one.prompt_ids}
    poison = next(token for token in range(256) if token not in used) if len(used) < 256 else 255
    good = [one for one in good if poison not in one.prompt_ids]
    bad = []
    for n, one in enumerate(good[::3]):
        prompt = list(one.prompt_ids)
        prompt.insert((min(100, len(prompt)), len(prompt), 0, min(70, len(prompt)))[n % 4], poison)
        bad.append(replace(one, job_id=f"bad{n}", prompt_ids=tuple(prompt)))
    requests = [one for pair in zip(bad * 3, good, strict=False) for one in pair]
    with closing(runner_of(file, depth=3, kv_pages=60)) as runner:
        table = runner._model.weights.embedding
        row = runner.device.pinned(table.columns, np.float16)
        row[:] = np.nan
        runner.device.copy_in(table.address + 2 * table.columns * poison, row)
        runner.device.synchronize()
        done = Schedule(runner, budget=130, sequences=3).complete(requests)
    failed = {job for job, one in done.items() if one.stop_reason is StopReason.ERROR}
    drew = {one.job_id for one in good if poison in plain[one.job_id].token_ids[:-1]}
    assert failed == {one.job_id for one in bad} | drew
    kept = {job: one for job, one in done.items() if job not in failed}
    assert bits(kept) == {job: one for job, one in bits(plain).items() if job in kept}
    assert len(kept) > 6


def test_drawn_tokens_that_are_computed_again_together_give_the_bits_of_one_by_one(file: GgufFile) -> None:
    """Several of each of two sequences in a step, beside a piece of a prompt."""
    texts = np.random.default_rng(3).integers(0, 256, (2, 120)).tolist()
    pages = Pages(12, CONTEXT // BLOCK)
    cuda = Cuda(
        file, read_spec(file), slots=12, kv_pages=12 * (CONTEXT // BLOCK), max_tokens=1024, max_draws=256,
        context=CONTEXT, tune=False,
    )  # fmt: skip
    with closing(cuda.runner):
        for lengths in ((64, 65), (3, 100), (90, 63)):
            alone = []
            for slot, (text, length) in enumerate(zip(texts, lengths, strict=True)):
                logits_of(cuda, pages, [Chunk(slot, text, 0, length)], admit=True)
                for place in range(length, length + 10):
                    last = logits_of(cuda, pages, [Chunk(slot, text, place, 1, drawn=True)], admit=False)
                alone.append(last)
            together = list(zip((2, 3), texts, lengths, strict=True))
            logits_of(
                cuda, pages, [Chunk(slot, text, 0, length) for slot, text, length in together], admit=True
            )
            for first, last_place in ((0, 1), (1, 6), (6, 10)):
                again = [
                    Chunk(slot, text, length + place, 1, int(place == last_place - 1), drawn=True)
                    for slot, text, length in together
                    for place in range(first, last_place)
                ]
                found = logits_of(cuda, pages, [*again, Chunk(5, texts[0], 0, 64)], admit=False)
            np.testing.assert_array_equal(found[:2], np.concatenate(alone))


def test_a_prompt_and_drawn_tokens_behind_it_may_come_in_one_step(file: GgufFile) -> None:
    """As of a text that goes on from saved tokens: its prompt goes through states, then what was drawn."""
    text = np.random.default_rng(3).integers(0, 256, 120).tolist()
    pages = Pages(8, CONTEXT // BLOCK)
    cuda = Cuda(
        file, read_spec(file), slots=8, kv_pages=8 * (CONTEXT // BLOCK), max_tokens=1024, max_draws=256,
        context=CONTEXT, tune=False,
    )  # fmt: skip
    with closing(cuda.runner):
        for length in (5, 64, 100):
            logits_of(cuda, pages, [Chunk(0, text, 0, length)], admit=True)
            for place in range(length, length + 5):
                last = logits_of(cuda, pages, [Chunk(0, text, place, 1, drawn=True)], admit=False)
            again = [Chunk(1, text, length + n, 1, int(n == 4), drawn=True) for n in range(5)]
            found = logits_of(cuda, pages, [*again, Chunk(1, text, 0, length, 0)], admit=True)
            np.testing.assert_array_equal(found, last)


def test_a_snapshot_is_the_state_of_its_prompt(file: GgufFile) -> None:
    """A slot that begins as it goes on as the slot that it was taken of."""
    spec = read_spec(file)
    text = np.random.default_rng(3).integers(0, spec.vocab, 300).tolist()
    pages = Pages(2, CONTEXT // BLOCK)
    cuda = Cuda(
        file, spec, slots=2, kv_pages=2 * (CONTEXT // BLOCK), max_tokens=512, max_draws=256, context=CONTEXT,
        tune=False,
    )  # fmt: skip
    with closing(cuda.runner):
        runner = cuda.runner
        assert runner.snapshots >= 1
        assert runner.prompt_grid == STATE_CHUNK
        batch = pages.batch([Chunk(0, text, 0, 128)], admit=True)
        runner.launch(replace(batch, snapshots=((0, 0),)))
        runner.collect()
        whole = logits_of(cuda, pages, [Chunk(0, text, 128, 100)], admit=False)
        # The other slot has the pages of the first one, and the snapshot.
        pages.tables[1] = pages.tables[0]
        batch = pages.batch([Chunk(1, text, 128, 100)], admit=False)
        begun = (Admission(1, tuple(text), GREEDY, 0, snapshot=0),)
        runner.launch(replace(batch, admissions=begun))
        runner.collect()
        np.testing.assert_array_equal(cuda.show(1), whole)


def test_what_is_taken_is_what_was_planned(kind: str, file: GgufFile) -> None:
    """With states of as many sequences as there is memory for."""
    spec: ModelSpec = read_spec(file)
    with closing(runner_of(file, slots=64, kv_pages=None, gpu_memory=900 << 20)) as runner:
        assert runner.memory.states.bytes >= (runner.slots + runner.snapshots) * spec.state_bytes
        assert runner.memory.states.slots == runner.slots == 64
