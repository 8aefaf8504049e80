"""A token depends on its place alone: not on the batch, the cuts of its prompt, sharing, interruptions.

All is compared to the bit. Prompts come from prefill attention and drawn tokens from decode attention,
however often and in whatever company they are computed.
"""

from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.element_choice import choose_element
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.kv_format import KvFormat
from tests.gpu.conftest import Make
from tests.support.cuda_runners import need_fp8
from tests.support.driving import BLOCK, Chunk, Cuda, Pages, generate, logits_of
from tests.support.engines import NoText, bits, complete, engine_of
from tests.support.ggufs import write_model
from tests.support.parts import PARTS, file_of_halves
from tests.support.true_guesses import guess_truly

LONGEST = 1100
CONTEXT = 1536
BF16 = GGMLQuantizationType.BF16

Logits = npt.NDArray[np.float32]


HEADS: dict[str, dict[str, Any]] = {
    "64": {"architecture": "qwen2", "width": 448, "heads": 7, "kv_heads": 1, "head_dim": 64},
    "128": {"architecture": "qwen3", "width": 256, "heads": 4, "kv_heads": 2, "head_dim": 128},
    "16": {"architecture": "llama", "width": 64, "heads": 4, "kv_heads": 2},
    "64 in BF16": {
        "architecture": "qwen2", "width": 448, "heads": 7, "kv_heads": 1, "head_dim": 64, "kind": BF16,
    },
    "128 in BF16": {
        "architecture": "qwen3", "width": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "kind": BF16,
    },
}  # fmt: skip
"""Heads of 64 and 128 have fast attention, others the general one. Files in BF16 are computed in it.

Beside them, specs of PARTS.
"""


CASES = [(heads, WeightsFormat.ELEMENT, KvFormat.ELEMENT) for heads in HEADS]
CASES += [(heads, WeightsFormat.ELEMENT, KvFormat.FP8) for heads in ("64", "16", "128 in BF16")]
CASES += [(part, WeightsFormat.ELEMENT, KvFormat.ELEMENT) for part in ("sinks", "latents")]
CASES += [("latents", WeightsFormat.FP8, KvFormat.ELEMENT)]
CASES += [("64", WeightsFormat.FP8, KvFormat.ELEMENT), ("128 in BF16", WeightsFormat.FP8, KvFormat.FP8)]
Case = tuple[str, WeightsFormat, KvFormat]


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case[0]}, {case[1].value}, KV {case[2].value}"
)
def case(request: pytest.FixtureRequest) -> Any:
    if request.param[1] is WeightsFormat.FP8:
        need_fp8()
    return request.param


@pytest.fixture(scope="module")
def file(case: Case, tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    if case[0] in PARTS:
        return file_of_halves(path.parent, PARTS[case[0]])
    return GgufFile.open(write_model(path, seed=3, ffn=384, context_length=CONTEXT, **HEADS[case[0]]))


@pytest.fixture(scope="module")
def spec(case: Case, file: GgufFile) -> ModelSpec:
    """In place of that which keys of a file say."""
    return PARTS[case[0]] if case[0] in PARTS else read_spec(file)


@pytest.fixture(scope="module")
def defaults(case: Case, file: GgufFile, spec: ModelSpec) -> dict[str, Any]:
    precision = Precision(choose_element(file, spec).element, *case[1:])
    return {"max_tokens": 2048, "tune": False, "precision": precision}


def texts(spec: ModelSpec, lengths: list[int], seed: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, spec.vocab, length).tolist()) for length in lengths]


def cuts(rng: np.random.Generator, length: int) -> list[tuple[int, int]]:
    """Random pieces (start, length) of a prompt, of a single token among them."""
    most = int(rng.integers(1, 600))
    pieces, start = [], 0
    while start < length:
        size = min(int(rng.choice([1, 1, 15, 16, 17, rng.integers(1, most + 1)])), length - start)
        if length - start > 400 and size < 15:
            size = min(int(rng.integers(1, most + 1)), length - start)
        pieces.append((start, size))
        start += size
    return pieces


def test_logits_of_a_prompt_do_not_depend_on_how_it_is_cut(
    file: GgufFile, spec: ModelSpec, defaults: dict[str, Any]
) -> None:
    context = CONTEXT
    rng = np.random.default_rng(11)
    lengths = [1, 2, 15, 16, 17, 33, 1 + 64 * 5, *rng.integers(1, LONGEST + 1, 20).tolist(), LONGEST]
    pages = Pages(2, -(-context // BLOCK))
    cuda = Cuda(file, spec, slots=2, kv_pages=2 * -(-context // BLOCK), context=context, **defaults)
    with closing(cuda.runner):
        for text in texts(spec, lengths, 5):
            whole = logits_of(cuda, pages, [Chunk(0, text, 0, len(text))], admit=True)
            for start, length in cuts(rng, len(text)):
                last = logits_of(cuda, pages, [Chunk(1, text, start, length)], admit=start == 0)
            np.testing.assert_array_equal(last, whole, err_msg=f"a prompt of {len(text)} tokens")


def again(slot: int, text: tuple[int, ...], places: range) -> list[Chunk]:
    """Drawn tokens that are computed again in one step; the last one draws."""
    return [Chunk(slot, text, place, 1, int(place == places[-1]), drawn=True) for place in places]


def test_logits_after_drawn_tokens_are_the_same_when_these_are_computed_again(
    file: GgufFile, spec: ModelSpec, defaults: dict[str, Any]
) -> None:
    context = CONTEXT
    per_slot = -(-context // BLOCK)
    pages = Pages(40, per_slot)
    cuda = Cuda(file, spec, slots=40, kv_pages=40 * per_slot, context=context, **defaults)
    with closing(cuda.runner):
        for prompt, drawn in ((1, 30), (16, 33), (33, 30), (700, 35)):
            (text,) = texts(spec, [prompt + drawn], prompt)
            logits_of(cuda, pages, [Chunk(0, text, 0, prompt)], admit=True)
            for place in range(prompt, prompt + drawn):
                first = logits_of(cuda, pages, [Chunk(0, text, place, 1, drawn=True)], admit=False)
            # Elsewhere: all in one step, each drawn token a row of its own over the same pages.
            rows = again(1, text, range(prompt, prompt + drawn))
            found = logits_of(cuda, pages, [*rows, Chunk(1, text, 0, prompt, draws=0)], admit=True)
            np.testing.assert_array_equal(found, first)
            logits_of(cuda, pages, [Chunk(2, text, 0, prompt)], admit=True)
            for start in range(prompt, prompt + drawn, 7):
                some = range(start, min(start + 7, prompt + drawn))
                found = logits_of(cuda, pages, again(2, text, some), admit=False)
            np.testing.assert_array_equal(found, first)


def answers(
    runner: CudaRunner, asked: list[Request], *, context: int, budget: int, sharing: bool, interrupt: int = 0
) -> dict[str, tuple[int, ...]]:
    """The drawn tokens by job; interrupt: after so many steps all go on from there, in a new engine."""
    tokens: dict[str, tuple[int, ...]] = {}
    waiting = asked
    while waiting:
        engine = Engine(
            runner,
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(context_length=context, max_sequences=runner.slots, token_budget=budget),
            prefix_sharing=sharing,
        )
        for one in waiting:
            engine.submit(one)
        steps = 0
        while engine.has_work and not (interrupt and steps == interrupt):
            for done in engine.step():
                assert done.error is None, done.error
                tokens[done.job_id] = done.token_ids
            steps += 1
        left = {partial.job_id: partial.token_ids for partial in engine.abandon()}
        for done in engine.step() if engine.has_work else []:
            tokens[done.job_id] = done.token_ids
        waiting = [
            Request(
                one.job_id, one.attempt, one.prompt_ids, one.params, one.seed, generated_ids=left[one.job_id]
            )
            for one in waiting
            if one.job_id in left
        ]
        interrupt *= 2  # so that it comes to an end
    return tokens


def test_answers_are_the_same_in_any_company_and_through_any_interruption(
    spec: ModelSpec, make: Make
) -> None:
    context = CONTEXT
    rng = np.random.default_rng(3)
    beginnings = texts(spec, [400, 33, 16], 8)
    prompts = []
    for index in range(96):
        own = texts(spec, [int(rng.choice([1, 2, 16, 17, rng.integers(1, 200)]))], 100 + index)[0]
        beginning = beginnings[index % 4] if index % 4 < 3 else ()
        prompts.append(beginning + own)
    prompts += [(prompt[:-1] or prompt) for prompt in prompts[:8]]
    params = [
        GenerationParams(max_tokens=48 + index % 20, temperature=1.0 if index % 3 else 0.0)
        for index in range(len(prompts))
    ]
    asked = [
        Request(str(index), 1, prompt, params[index], seed=700 + index)
        for index, prompt in enumerate(prompts)
    ]
    page = -(-context // BLOCK)
    wide = make(slots=128, kv_pages=128 * page, context=context)
    first = generate(wide, asked, context=context, token_budget=2048)
    assert first == answers(wide, asked, context=context, budget=131, sharing=True)
    assert first == answers(wide, asked, context=context, budget=2048, sharing=False)
    assert first == answers(wide, asked, context=context, budget=700, sharing=True, interrupt=5)
    few = make(slots=3, kv_pages=3 * page, context=context)
    assert first == answers(few, asked, context=context, budget=64, sharing=True)
    tight = make(slots=37, kv_pages=page + 40, context=context, depth=3)  # sequences give way again and again
    assert first == answers(tight, asked, context=context, budget=300, sharing=True)
    assert first == answers(tight, asked, context=context, budget=300, sharing=True, interrupt=9)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
def test_drafts_change_no_bit(
    spec: ModelSpec, make: Make, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Of eight sequences and fewer; contexts that are split, whole, of one token; with logprobs."""
    context, page = CONTEXT, -(-CONTEXT // BLOCK)
    prompts = texts(spec, [1, 15, 16, 17, 200, 640, 1000, 1100], 21)
    asked = [
        Request(
            str(index), 1, prompt,
            GenerationParams(max_tokens=40 + index, temperature=index % 2, logprobs=3 if index % 3 else None),
            900 + index,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    runner = make(slots=48, kv_pages=48 * page, context=context, graphs=graphs)
    alone = engine_of(runner, context, sharing=False)
    done = {one.job_id: complete(alone, [one])[one.job_id] for one in asked}
    plain = bits(done)
    guess_truly(monkeypatch, {job: one.token_ids for job, one in done.items()}, vocab=spec.vocab)
    engine = engine_of(runner, context, budget=2048, drafts=Drafts.NGRAM)
    for some in (asked, asked[-1:], asked[3:5]):
        assert bits(complete(engine, some)) == {one.job_id: plain[one.job_id] for one in some}
    assert engine.stats.guessed_tokens > engine.stats.guessed_right > 100
