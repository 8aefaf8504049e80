"""The CUDA runner on the bundled model: against the reference runner, and against itself in other company."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.request import Request
from nightmill.worker.model.chat import ChatTemplate
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.base import mask_words
from nightmill.worker.runners.gpu.device.device import DeviceMemoryError
from nightmill.worker.runners.gpu.device.graphs import Graph
from tests.gpu.conftest import Make
from tests.support.comparing import compare_logits, nmse
from tests.support.constraints import EveryNth
from tests.support.driving import BLOCK, Chunk, Cuda, Pages, Reference, generate, logits_of
from tools.demo_model.corpus import held_out_pairs

PROMPTS = 200
CONTEXT = 512
NEAR_TIE = 0.01  # of logits whose standard deviation is about 3


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return GgufFile.open(demo_model())


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return {"slots": 8, "kv_pages": 8 * 32, "max_tokens": 2048, "tune": False, "context": CONTEXT}


@pytest.fixture(scope="module")
def prompts(file: GgufFile) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_gguf(file)
    chat = ChatTemplate.from_gguf(file, tokenizer)
    asked = "Write a haiku about {} that contains the word {}"
    return [
        tuple(chat.encode([{"role": "user", "content": asked.format(*pair)}]))
        for pair in held_out_pairs(PROMPTS, seed=1)
    ]


def random_tokens(spec: ModelSpec, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, spec.vocab, count).tolist()


def requests(prompts: Sequence[tuple[int, ...]], params: GenerationParams) -> list[Request]:
    return [Request(str(index), 1, prompt, params, seed=1000 + index) for index, prompt in enumerate(prompts)]


def test_logits_agree_with_the_reference_in_every_kind_of_step(file: GgufFile, spec: ModelSpec) -> None:
    """A long prompt, a short one, one of a single token; then mixed steps; then steps of drawn tokens."""
    pages = Pages(4, CONTEXT // BLOCK)
    options = {"kv_pages": 4 * CONTEXT // BLOCK, "slots": 4}
    texts = [random_tokens(spec, 400, seed) for seed in range(4)]

    def drawn(slot: int, place: int) -> Chunk:
        return Chunk(slot, texts[slot], place, 1, drawn=True)

    steps: list[tuple[bool, list[Chunk]]] = [
        (True, [Chunk(0, texts[0], 0, 200, 200)]),
        (True, [Chunk(1, texts[1], 0, 1), Chunk(2, texts[2], 0, 17, 17)]),
        (True, [drawn(0, 200), Chunk(1, texts[1], 1, 1), Chunk(3, texts[3], 0, 63, 63)]),
        (False, [drawn(2, 17), Chunk(0, texts[0], 201, 65, 65), Chunk(1, texts[1], 2, 100, 3)]),
        *((False, [drawn(0, 266 + i), drawn(2, 18 + i)]) for i in range(20)),
        *((False, [drawn(s, p + i) for s, p in ((0, 286), (1, 102), (2, 38))]) for i in range(20)),
    ]
    cuda = Cuda(file, spec, tune=False, max_tokens=512, max_draws=512, context=CONTEXT, **options)
    reference = Reference(file, spec, **options)
    with closing(cuda.runner):
        ours, theirs = [], []
        for admit, chunks in steps:
            ours.append(logits_of(cuda, pages, chunks, admit=admit))
            theirs.append(logits_of(reference, pages, chunks, admit=admit))
    for (_, chunks), left, right in zip(steps, ours, theirs, strict=True):
        assert nmse(left, right) < 5e-5, chunks
    agreement = compare_logits(np.concatenate(ours), np.concatenate(theirs))
    print("demo model against the reference runner:", agreement)  # noqa: T201
    agreement.check()
    with pytest.raises(AssertionError):
        compare_logits(np.concatenate(ours) * 1.01, np.concatenate(theirs)).check()


def test_greedy_text_is_the_references(
    file: GgufFile, spec: ModelSpec, make: Make, prompts: list[tuple[int, ...]]
) -> None:
    """200 prompts; where texts part, the best two tokens were a near-tie, which is shown."""
    asked = requests(prompts, GenerationParams(temperature=0.0, max_tokens=48))
    eos = Tokenizer.from_gguf(file).eos_ids
    ours = generate(make(slots=64, kv_pages=64 * 8), asked, context=CONTEXT, token_budget=1024, eos_ids=eos)
    reference = Reference(file, spec, kv_pages=32 * 8, slots=32)
    theirs = generate(reference.runner, asked, context=CONTEXT, token_budget=512, eos_ids=eos)
    assert len(ours) == len(theirs) == PROMPTS
    parted = [request for request in asked if ours[request.job_id] != theirs[request.job_id]]
    for request in parted:
        left, right = ours[request.job_id], theirs[request.job_id]
        place = next(i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
        known = [*request.prompt_ids, *right[:place]]
        chunk = Chunk(0, known, 0, len(known))
        row = logits_of(reference, Pages(1, CONTEXT // BLOCK), [chunk], admit=True)[0]
        gap = float(row[right[place]] - row[left[place]])
        print(f"prompt {request.job_id} parts at token {place}: the best two differ by {gap:.4f}")  # noqa: T201
        assert 0 <= gap < NEAR_TIE
    print(f"{PROMPTS - len(parted)} of {PROMPTS} greedy texts are identical")  # noqa: T201
    assert len(parted) <= PROMPTS // 25


def test_a_prompt_in_one_piece_in_chunks_and_token_by_token(file: GgufFile, spec: ModelSpec) -> None:
    text = random_tokens(spec, 300, 7)
    pages = Pages(4, CONTEXT // BLOCK)
    cuda = Cuda(
        file, spec, slots=4, kv_pages=4 * 32, tune=False, max_tokens=512, max_draws=512, context=CONTEXT
    )
    with closing(cuda.runner):
        whole = logits_of(cuda, pages, [Chunk(0, text, 0, 300, 300)], admit=True)
        chunked, start = [], 0
        for length in (1, 7, 63, 65, 100, 64):
            chunked.append(logits_of(cuda, pages, [Chunk(1, text, start, length, length)], admit=start == 0))
            start += length
        single = [logits_of(cuda, pages, [Chunk(2, text, i, 1)], admit=i == 0) for i in range(300)]
        drawn = [logits_of(cuda, pages, [Chunk(3, text, i, 1, 1, True)], admit=i == 0) for i in range(300)]
    np.testing.assert_array_equal(np.concatenate(chunked), whole)
    np.testing.assert_array_equal(np.concatenate(single), whole)
    assert nmse(np.concatenate(drawn), whole) < 1e-5  # as if all were drawn: other kernels
    compare_logits(np.concatenate(drawn), whole).check()


def test_rows_that_draw_alone_and_beside_others(file: GgufFile, spec: ModelSpec) -> None:
    """Only they pass the whole last layer: the same logits where all draw, where some do, after none did."""
    texts = [random_tokens(spec, 80, seed) for seed in (8, 9, 10)]
    pages = Pages(6, CONTEXT // BLOCK)
    cuda = Cuda(
        file, spec, slots=6, kv_pages=6 * 32, tune=False, max_tokens=512, max_draws=512, context=CONTEXT
    )
    steps = [  # length of each sequence's chunk, and how many of its rows draw
        ((40, 5, 1), (0, 0, 0)),
        ((20, 3, 1), (3, 0, 1)),
        ((1, 1, 1), (0, 1, 0)),  # rows as few as those of a decode step
        ((1, 1, 1), (0, 0, 0)),
        ((1, 30, 1), (1, 0, 1)),
    ]
    starts = [0, 0, 0]
    with closing(cuda.runner):
        for turn, (lengths, draws) in enumerate(steps):
            chunks = list(zip(texts, starts, lengths, strict=True))
            every = [Chunk(slot, *chunk, chunk[2]) for slot, chunk in enumerate(chunks)]
            some = [Chunk(3 + slot, *chunk, draws[slot]) for slot, chunk in enumerate(chunks)]
            whole = np.split(logits_of(cuda, pages, every, admit=turn == 0), np.cumsum(lengths)[:-1])
            expected = [rows[len(rows) - draw :] for rows, draw in zip(whole, draws, strict=True)]
            drawn = logits_of(cuda, pages, some, admit=turn == 0)
            np.testing.assert_array_equal(drawn, np.concatenate(expected))
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize(
    "params",
    [
        GenerationParams(temperature=0.0, max_tokens=48, ignore_eos=True),
        GenerationParams(temperature=0.8, max_tokens=48, ignore_eos=True),
        GenerationParams(
            temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2, max_tokens=48,
            ignore_eos=True,
        ),
        GenerationParams(
            temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1,
            logit_bias={5: 3.0, 7: -100.0}, max_tokens=48, ignore_eos=True,
        ),
    ],
    ids=["greedy", "temperature", "filtered", "adjusted"],
)  # fmt: skip
def test_a_job_alone_and_in_a_batch_of_256(
    make: Make, prompts: list[tuple[int, ...]], params: GenerationParams
) -> None:
    many = requests([*prompts, *prompts[:56]], params)
    runner = make(slots=256, kv_pages=256 * 8, max_tokens=4096, context=128, tune=True)
    together = generate(runner, many, context=128, token_budget=4096, check=False)
    different = []
    for request in many[:24]:
        alone = generate(runner, [request], context=128, token_budget=4096)
        if alone[request.job_id] != together[request.job_id]:
            different.append(request.job_id)
    print(f"{24 - len(different)} of 24 are the same alone and among 256")  # noqa: T201
    assert not different


def test_running_ahead_changes_no_token(make: Make, prompts: list[tuple[int, ...]]) -> None:
    params = GenerationParams(temperature=0.8, repetition_penalty=1.1, max_tokens=40)
    asked = requests(prompts[:40], params)
    results = [
        generate(make(depth=depth, slots=16, kv_pages=16 * 8), asked, context=CONTEXT, token_budget=256)
        for depth in (1, 2, 3)
    ]
    assert results[0] == results[1] == results[2]


def test_graphs_change_no_token(make: Make, prompts: list[tuple[int, ...]]) -> None:
    asked = requests(prompts[:40], GenerationParams(temperature=0.8, max_tokens=40))
    results = [
        generate(make(graphs=graphs, slots=16, kv_pages=16 * 8), asked, context=CONTEXT, token_budget=256)
        for graphs in (True, False)
    ]
    assert results[0] == results[1]


def test_contexts_that_grow_until_they_are_cut_change_no_token(
    make: Make, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole contexts and pieces of them have graphs of their own."""
    replayed: list[Graph] = []
    launch = Graph.launch

    def noted(graph: Graph) -> None:
        replayed.append(graph)
        launch(graph)

    asked = requests(prompts[:64], GenerationParams(temperature=0.8, max_tokens=270, ignore_eos=True))
    results = []
    for graphs in (False, True):
        runner = make(graphs=graphs, slots=64, kv_pages=64 * 24)
        monkeypatch.setattr(Graph, "launch", noted)
        results.append(generate(runner, asked, context=CONTEXT, token_budget=2048, check=False))
    contexts = np.full(64, 300, dtype=np.int32), np.arange(64, dtype=np.int32)
    are_cut = len(runner._plans.pieces(*contexts)[0]) > 64
    assert runner._graphs is not None
    cut = [graph for (size, (room,)), graph in runner._graphs.usual.items() if room > size]
    assert any(graph in replayed for graph in cut) == are_cut
    assert results[0] == results[1]


def test_preemption_changes_no_token(make: Make, prompts: list[tuple[int, ...]]) -> None:
    params = GenerationParams(temperature=0.8, repetition_penalty=1.1, max_tokens=60, ignore_eos=True)
    asked = requests(prompts[:12], params)
    roomy = generate(make(slots=12, kv_pages=12 * 8), asked, context=CONTEXT, token_budget=256)
    tight = generate(make(slots=12, kv_pages=30), asked, context=CONTEXT, token_budget=256)
    assert roomy == tight


def test_an_answer_has_what_its_wishes_leave_it(make: Make, prompts: list[tuple[int, ...]]) -> None:
    """Every second text has wishes; in steps of graphs, of kernels, ahead, and where sequences give way."""
    plain = GenerationParams(temperature=0.8, max_tokens=60, ignore_eos=True)
    free = requests(prompts[:24], plain)
    clean = generate(make(slots=12, kv_pages=12 * 8), free, context=CONTEXT, token_budget=256)
    often = [token for token, _ in Counter(chain(*clean.values())).most_common(2)]
    pairs = [pair for pair, _ in Counter(chain(*map(pairwise, clean.values()))).most_common(40)]
    banned = (*pairs, (often[0],))
    wishes = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {often[1]: -100.0}}
    params = GenerationParams.parse(plain.model_dump() | wishes)
    asked = [replace(one, params=params, banned=banned) if n % 2 else one for n, one in enumerate(free)]
    results = [
        generate(make(**options), asked, context=CONTEXT, token_budget=256)
        for options in (
            {"slots": 12, "kv_pages": 12 * 8, "depth": 3},
            {"slots": 12, "kv_pages": 30},
            {"slots": 24, "kv_pages": 24 * 8, "graphs": False},
        )
    ]
    assert results[0] == results[1] == results[2]
    for one in asked:
        text = results[0][one.job_id]
        if not one.banned:
            assert text == clean[one.job_id]
            continue
        assert not set(often) & set(text)
        assert not set(pairwise(text)) & set(banned)
        assert len(set(text)) > len(set(clean[one.job_id]))


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"temperature": 0.8, "repetition_penalty": 1.1}])
def test_masked_draws_are_of_what_is_allowed_and_change_nobody_else(
    make: Make, spec: ModelSpec, prompts: list[tuple[int, ...]], change: dict[str, float]
) -> None:
    """Every third text is constrained, in steps of graphs, of kernels and where sequences give way."""
    params = GenerationParams.parse({"max_tokens": 40, "ignore_eos": True} | change)
    free = requests(prompts[:40], params)
    options: dict[str, object] = {"slots": 16, "kv_pages": 16 * 8}

    def constrained(step: int) -> list[Request]:
        return [
            one if n % 3 else replace(one, constraint=EveryNth(spec.vocab, step))
            for n, one in enumerate(free)
        ]

    clean = generate(make(**options), free, context=CONTEXT, token_budget=256)
    masked = []
    for other in ({}, {"graphs": False}, {"depth": 1}, {"depth": 3, "kv_pages": 40}):
        runner = make(**(options | other))
        assert generate(runner, constrained(1), context=CONTEXT, token_budget=256) == clean
        masked.append(generate(runner, constrained(7), context=CONTEXT, token_budget=256))
    assert all(one == masked[0] for one in masked)
    for n, request in enumerate(free):
        tokens = masked[0][request.job_id]
        if n % 3:
            assert tokens == clean[request.job_id]
        else:
            assert all((token + place) % 7 == 0 for place, token in enumerate(tokens))


def test_masked_draws_are_the_references(file: GgufFile, spec: ModelSpec) -> None:
    """More rows than are drawn at once, of which some have masks: logits and tokens of one step."""
    rng = np.random.default_rng(4)
    count, rows = 24, 30  # tokens of each of so many prompts, all of which draw: 720 rows
    pages = Pages(count, 4)
    chunks = [Chunk(slot, random_tokens(spec, rows, slot), 0, rows, rows) for slot in range(count)]
    batch = pages.batch(chunks, admit=True)
    masked = np.flatnonzero(rng.random(count * rows) < 0.4)
    batch.draws["mask"][masked] = np.arange(len(masked))
    allowed = rng.random((len(masked), 32 * mask_words(spec.vocab))) < 0.01
    masks = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    options = {"slots": count, "kv_pages": count * 4}
    drawn = []
    cuda = Cuda(file, spec, tune=False, max_tokens=1024, max_draws=1024, context=64, **options)
    reference = Reference(file, spec, **options)
    with closing(cuda.runner):
        for subject in (cuda, reference):
            subject.runner.launch(batch)
            subject.runner.draw(masks)
            one = subject.runner.collect()
            assert one is not None
            drawn.append(one.tokens)
    ours, theirs = drawn
    assert all(allowed[mask, token] for mask, token in enumerate(ours[masked]))
    logits = reference.show(len(ours))
    parted = np.flatnonzero(ours != theirs)
    assert all(logits[row, theirs[row]] - logits[row, ours[row]] < NEAR_TIE for row in parted)
    assert len(parted) < len(ours) // 50


def test_a_model_that_cannot_fit_is_refused_with_numbers(make: Make) -> None:
    with pytest.raises(
        DeviceMemoryError, match=r"weights [\d,]+ bytes.*--gpu-memory 0\.0001.*Lower --max-seq"
    ):
        make(gpu_memory=0.0001, kv_pages=None)


def test_more_launches_than_depth_are_refused(make: Make, spec: ModelSpec) -> None:
    runner = make(depth=1)
    batch = Pages(1, 4).batch([Chunk(0, random_tokens(spec, 5, 0), 0, 5)], admit=True)
    runner.launch(batch)
    with pytest.raises(RunnerError, match="collect one first"):
        runner.launch(replace(batch, admissions=()))
    assert runner.collect() is not None
    assert runner.collect() is None


def test_closing_gives_all_memory_back(make: Make) -> None:
    first = make()
    free = first.memory.free
    second = make()
    assert abs(second.memory.free - free) < 64 << 20


def test_tokens_that_the_host_does_not_know_come_from_the_slot(make: Make, spec: ModelSpec) -> None:
    text = random_tokens(spec, 20, 3)
    runner = make(depth=2)
    pages = Pages(2, 4)

    def drawn() -> npt.NDArray[np.int32]:
        sampled = runner.collect()
        assert sampled is not None
        return sampled.tokens

    runner.launch(pages.batch([Chunk(0, text, 0, 20)], admit=True))
    runner.launch(pages.batch([Chunk(0, [*text, -1], 20, 1)], admit=False))
    first, second = drawn()[0], drawn()[0]
    runner.launch(pages.batch([Chunk(1, [*text, int(first)], 0, 21)], admit=True))
    assert drawn()[0] == second


def test_thousands_of_steps_leak_nothing(make: Make, prompts: list[tuple[int, ...]]) -> None:
    runner = make(slots=32, kv_pages=32 * 8)
    asked = requests(prompts, GenerationParams(temperature=0.7, max_tokens=60, ignore_eos=True))
    generate(runner, asked[:64], context=128, token_budget=256, check=False)
    free, process = runner.device.free_memory(), psutil.Process()
    resident = process.memory_info().rss
    for _ in range(5):
        generate(runner, asked, context=128, token_budget=256, check=False)
    assert runner.device.free_memory() == free
    assert process.memory_info().rss < resident + (16 << 20)
