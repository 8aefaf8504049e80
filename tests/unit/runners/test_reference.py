"""The reference runner through the engine: the right tokens, whatever the batch, the chunks and the pages."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import NOT_A_NUMBER, Admission, StepBatch, make_draws, mask_words
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.philox import token_words, uniform
from nightmill.worker.runners.reference import ReferenceRunner, choose_kv_pages, choose_slots
from nightmill.worker.runners.sampling import gumbel
from tests.support.comparing import compare_logits
from tests.support.constraints import EveryNth
from tests.support.driving import Chunk, Pages, Reference, logits_of
from tests.support.engines import NoText, complete
from tests.support.float64_oracle import straightforward_logits
from tests.support.ggufs import byte_vocabulary, write_model, write_spec
from tests.support.one_by_one import OneByOne
from tests.support.specs import GEMMAS, HYBRIDS, MIXTURES, PLAIN, VARIANTS

Array = npt.NDArray[np.float32]
VOCAB = len(byte_vocabulary().tokens)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2-seven-to-one": {"heads": 7, "kv_heads": 1, "width": 56, "tied": False},
    "qwen2-fourteen-to-two": {"heads": 14, "kv_heads": 2, "width": 56, "tied": False},
    "llama": {"architecture": "llama", "heads": 4, "kv_heads": 4, "tied": False},
    "llama3": {"architecture": "llama", "rope_freqs": np.linspace(1, 8, 8), "heads": 4},
    "qwen3": {"architecture": "qwen3", "heads": 4, "kv_heads": 2, "head_dim": 24, "ffn": 200},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 64}},
}


def names(spec: ModelSpec) -> list[str]:
    return [name for _, weight in spec.all_weights() for name in weight.names]


class Bench:
    """A model file and short ways to run it."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self.file, self.spec = file, spec

    def runner(self, *, kv_pages: int = 64, slots: int = 4, **options: Any) -> ReferenceRunner:
        return ReferenceRunner(self.file, self.spec, kv_pages=kv_pages, slots=slots, **options)

    def generate(
        self, requests: list[Request], *, budget: int = 512, at_once: int | None = None, **options: Any
    ) -> dict[str, Completion]:
        runner = self.runner(**options)
        engine = Engine(
            runner,
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(
                context_length=self.spec.context_length,
                max_sequences=at_once or runner.slots,
                token_budget=max(budget, at_once or 1),
            ),
            constraints=OneByOne(),
        )
        done = complete(engine, requests)
        assert all(completion.error is None for completion in done.values())
        self.stats = engine.stats
        return done

    def logits(self, prompt: list[int], answer: int = 5, **options: Any) -> tuple[tuple[int, ...], Array]:
        """A greedy answer and the logits each of its tokens was chosen from."""
        rows: list[Array] = []

        def keep(stage: str, values: Array) -> None:
            if stage == "logits":
                rows.append(values.copy())

        done = self.generate(
            [request("j", prompt, max_tokens=answer, temperature=0.0)], at_once=1, trace=keep, **options
        )
        return done["j"].token_ids, np.concatenate(rows)


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(tmp_path: Path) -> MakeBench:
    def make(name: str = "qwen2", **options: Any) -> Bench:
        path = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.gguf"
        if (spec := (VARIANTS | HYBRIDS | MIXTURES | GEMMAS).get(name)) is not None:
            return Bench(GgufFile.open(write_spec(path, spec)), spec)
        file = GgufFile.open(write_model(path, **(MODELS[name] | options)))
        return Bench(file, read_spec(file))

    return make


def request(job_id: str, prompt: list[int], *, seed: int = 0, priority: int = 5, **params: Any) -> Request:
    return Request(job_id, 1, tuple(prompt), GenerationParams.parse(params), seed, None, priority)


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def mixed_requests(count: int, **more: Any) -> list[Request]:
    """Requests of many lengths and all kinds of sampling."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {}, {"top_k": 20, "temperature": 0.8}, {"top_p": 0.9},
        {"repetition_penalty": 1.3}, {"min_p": 0.05, "repetition_penalty": 0.9},
    ]  # fmt: skip
    params = [{"max_tokens": 10 + n % 7} | kinds[n % 6] | more for n in range(count)]
    return [request(f"j{n}", random_prompt(n, 1 + n * 37 % 90), seed=n, **params[n]) for n in range(count)]


@pytest.mark.parametrize("name", [*MODELS, *VARIANTS, *HYBRIDS, *MIXTURES, *GEMMAS])
def test_logits_agree_with_a_straightforward_model_in_float64(name: str, make_bench: MakeBench) -> None:
    bench = make_bench(name)
    prompt = random_prompt(1, 150)
    answer, logits = bench.logits(prompt, answer=8)
    expected = straightforward_logits(bench.file, bench.spec, prompt + list(answer[:-1]))[149:]
    error = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < 2e-5
    assert answer == tuple(expected.argmax(axis=1))
    assert len(set(answer)) > 1


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if set(names(VARIANTS[name])) == set(names(PLAIN))]
)
def test_what_a_spec_says_beyond_its_weights_counts(name: str, make_bench: MakeBench) -> None:
    bench, prompt = make_bench(name), random_prompt(1, 60)
    ours, plain = (straightforward_logits(bench.file, spec, prompt) for spec in (bench.spec, PLAIN))
    assert np.linalg.norm(ours[40:] - plain[40:]) > 0.02 * np.linalg.norm(plain[40:])


@pytest.mark.parametrize("name", [*MODELS, *VARIANTS, *HYBRIDS, *MIXTURES, *GEMMAS])
def test_chunks_of_any_size_give_the_same_bits(name: str, make_bench: MakeBench) -> None:
    bench = make_bench(name)
    prompt = random_prompt(2, 135)
    answer, whole = bench.logits(prompt)
    for budget in (64, 100) if name in HYBRIDS else (13, 64, *([1] if name == "qwen2" else [])):
        other, chunked = bench.logits(prompt, budget=budget)
        assert other == answer
        np.testing.assert_allclose(chunked, whole, rtol=1e-4, atol=1e-5)
        assert (chunked == whole).all()


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen2-seven-to-one", "llama", "qwen3", *HYBRIDS, *MIXTURES, *GEMMAS]
)
def test_a_job_gets_the_same_tokens_alone_and_in_a_crowd(name: str, make_bench: MakeBench) -> None:
    bench = make_bench(name)
    requests = mixed_requests(32)
    crowd = bench.generate(requests, slots=32, kv_pages=400)
    shuffled = [requests[n] for n in np.random.default_rng(0).permutation(32)]
    budget = 50 if bench.spec.state_bytes == 0 else 90
    other = bench.generate(shuffled, slots=7, kv_pages=400, budget=budget, page_size=4)
    assert {job: c.token_ids for job, c in other.items()} == {job: c.token_ids for job, c in crowd.items()}
    for alone in requests[::5]:
        assert bench.generate([alone], slots=1)[alone.job_id].token_ids == crowd[alone.job_id].token_ids
    assert len({completion.token_ids for completion in crowd.values()}) == 32


@pytest.mark.parametrize("name", ["qwen2-fourteen-to-two", *HYBRIDS, *MIXTURES, *GEMMAS])
def test_logits_have_the_same_bits_alone_and_in_a_crowd(name: str, make_bench: MakeBench) -> None:
    bench = make_bench(name)
    alone = bench.logits(random_prompt(3, 60), answer=4)[1]
    rows: list[Array] = []

    def keep(stage: str, values: Array) -> None:
        if stage == "logits":
            rows.append(values.copy())

    # All prompts end in the first step, so row 0 of every step belongs to "j", the highest in rank.
    crowd = [request("j", random_prompt(3, 60), max_tokens=4, temperature=0.0, priority=9)]
    crowd += [request(f"k{n}", random_prompt(n, 1 + 5 * n), seed=n, max_tokens=9) for n in range(31)]
    bench.generate(crowd, slots=32, kv_pages=400, budget=10_000, trace=keep)
    assert [len(row) for row in rows[:4]] == [32] * 4
    assert (np.stack([row[0] for row in rows[:4]]) == alone).all()


@pytest.mark.parametrize(
    ("depth", "name"),
    [
        *product((1, 2, 3), ["qwen2"]),
        *((1 + index % 3, name) for index, name in enumerate([*HYBRIDS, *MIXTURES])),
    ],
)
def test_preemption_and_running_ahead_change_no_token(depth: int, name: str, make_bench: MakeBench) -> None:
    bench = make_bench(name)
    requests = mixed_requests(12, max_tokens=60)
    roomy = bench.generate(requests, slots=12, kv_pages=300)
    assert bench.stats.preemptions == 0
    tight = bench.generate(requests, slots=12, kv_pages=26, depth=depth)
    assert bench.stats.preemptions > 0
    assert {job: c.token_ids for job, c in tight.items()} == {job: c.token_ids for job, c in roomy.items()}


@pytest.mark.parametrize("depth", [1, 2])
def test_masked_draws_are_of_what_is_allowed_and_change_nobody_else(
    depth: int, make_bench: MakeBench
) -> None:
    """Every third text is constrained; a constraint that allows everything changes no text either."""
    bench = make_bench()
    free = mixed_requests(18, max_tokens=30)
    clean = bench.generate(free, slots=18, kv_pages=300)
    for step, pages in ((1, 300), (5, 300), (5, 26)):  # with 26, sequences give way
        asked = [
            replace(one, constraint=None if n % 3 else EveryNth(VOCAB, step)) for n, one in enumerate(free)
        ]
        done = bench.generate(asked, slots=18, kv_pages=pages, depth=depth)
        assert (bench.stats.preemptions > 0) == (pages == 26)
        for n, one in enumerate(free):
            tokens = done[one.job_id].token_ids
            if n % 3 or step == 1:
                assert tokens == clean[one.job_id].token_ids
            else:
                assert all((token + place) % step == 0 for place, token in enumerate(tokens))
                assert len(tokens) == 30


def test_masks_come_between_launch_and_collect(make_bench: MakeBench) -> None:
    runner = make_bench().runner(depth=2)
    batch = one_token_batch([1])
    runner.launch(batch)
    masks = np.zeros((1, mask_words(VOCAB)), dtype=np.int32)
    with pytest.raises(RunnerError, match="no launch waits for masks"):
        runner.draw(masks)
    free = runner.collect()
    draws = batch.draws.copy()
    draws["mask"] = 0
    runner.launch(replace(batch, draws=draws))
    for call in (runner.collect, lambda: runner.launch(batch)):
        with pytest.raises(RunnerError, match="waits for its masks"):
            call()
    runner.draw(masks)
    drawn = runner.collect()
    runner.launch(replace(batch, draws=draws))
    runner.draw(~masks)
    everything = runner.collect()
    assert drawn is not None and everything is not None and free is not None
    assert drawn.tokens.tolist() == [NOT_A_NUMBER]
    assert everything.tokens.tolist() == free.tokens.tolist()


@pytest.mark.parametrize("name", ["qwen2", *HYBRIDS, *MIXTURES, *GEMMAS])
def test_what_must_not_be_read_is_not_read(name: str, make_bench: MakeBench) -> None:
    bench = make_bench(name)
    requests = mixed_requests(6)
    clean = bench.generate(requests, slots=6)
    runner = bench.runner(slots=6)
    for slot in range(6):
        runner.states.fill(slot, np.nan)
    runner._cache.fill(np.nan)  # every page; that of zeros behind them is none
    bench.runner = lambda **_: runner  # type: ignore[method-assign, misc, assignment]
    poisoned = bench.generate(requests)
    assert {job: c.token_ids for job, c in poisoned.items()} == {job: c.token_ids for job, c in clean.items()}
    assert all((zeros == 0).all() for zeros in runner._cache.zeros)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("head", [0, 1])
def test_every_kv_head_counts(part: str, head: int, make_bench: MakeBench) -> None:
    bench = make_bench(layers=1)
    name = f"blk.0.attn_{part}.weight"
    weight = bench.file.array(name).copy()
    weight[head * 16 : (head + 1) * 16] *= -1
    other = make_bench(layers=1, tensors={name: weight})
    prompt = random_prompt(5, 40)
    before, after = bench.logits(prompt, answer=1)[1], other.logits(prompt, answer=1)[1]
    assert np.linalg.norm(before - after) > 0.01 * np.linalg.norm(before)


def test_every_token_of_the_prompt_counts(make_bench: MakeBench) -> None:
    bench = make_bench()
    prompt = random_prompt(6, 40)
    logits = bench.logits(prompt, answer=1)[1]
    for place in (0, 1, 15, 16, 38, 39):
        changed = list(prompt)
        changed[place] = (changed[place] + 1) % VOCAB
        assert (bench.logits(changed, answer=1)[1] != logits).any()


def test_the_penalty_sees_prompt_and_answer_and_is_forgotten_with_the_slot(make_bench: MakeBench) -> None:
    bench = make_bench()
    prompt = random_prompt(7, 20)
    strong = {"repetition_penalty": 100.0, "temperature": 0.0, "max_tokens": 60}
    done = bench.generate([request("a", prompt, **strong), request("b", prompt, temperature=0.0)], slots=1)
    answer = done["a"].token_ids
    plain = bench.generate([request("b", prompt, temperature=0.0)], slots=1)
    # Negative logits multiplied by 100 sink out of reach, positive ones shrink to almost nothing.
    assert len(set(answer)) == len(answer)
    assert not set(answer) & set(prompt)
    assert done["b"].token_ids == plain["b"].token_ids


def test_bans_biases_and_counts_follow_the_answer_and_not_the_prompt(make_bench: MakeBench) -> None:
    bench = make_bench()
    prompt = random_prompt(9, 20)
    greedy = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    plain = bench.generate([request("a", prompt, **greedy)])["a"].token_ids
    first, second = plain[:2]
    biased = request("b", prompt, **greedy, logit_bias={first: -100.0})
    banned = replace(request("c", prompt, **greedy), banned=((first, second), (second, first, second)))
    counted = request("d", prompt, **greedy, presence_penalty=2.0, frequency_penalty=2.0)
    resumed = replace(counted, job_id="e", generated_ids=bench.generate([counted])["d"].token_ids[:7])
    done = bench.generate([biased, banned, counted, resumed])
    assert first not in done["b"].token_ids
    assert done["c"].token_ids[0] == first
    assert (first, second) not in pairwise(done["c"].token_ids)
    assert done["d"].token_ids[0] == first  # nothing was counted yet, whatever the prompt has
    assert len(set(done["d"].token_ids)) > len(set(plain))
    assert done["e"].token_ids == done["d"].token_ids


def test_the_seed_decides_and_repeats(make_bench: MakeBench) -> None:
    bench = make_bench()
    prompt = random_prompt(8, 10)
    first, second, again = (
        bench.generate([request("j", prompt, seed=seed, max_tokens=30)])["j"].token_ids
        for seed in (1, 2**63 - 1, 1)
    )
    assert first != second
    assert first == again


def one_token_batch(tokens: list[int]) -> StepBatch:
    def ints(*values: int) -> npt.NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    return StepBatch(
        tokens=ints(*tokens), positions=ints(0), cache_rows=ints(0), sequence_starts=ints(0, 1),
        context_lengths=ints(1), page_tables=ints(0)[None], slots=ints(0),
        draws=make_draws(ints(0), ints(0), ints(1)), drawn=0,
        admissions=(Admission(0, tuple(tokens), GenerationParams(), 0),),
    )  # fmt: skip


def test_a_draw_is_keyed_by_seed_and_the_place_of_the_token_drawn(make_bench: MakeBench) -> None:
    logits: list[Array] = []
    runner = make_bench().runner(
        trace=lambda stage, values: logits.append(values) if stage == "logits" else None
    )
    batch = one_token_batch([1])
    seed = (7 << 32) + 5
    runner.launch(replace(batch, admissions=(Admission(0, (1,), GenerationParams(), seed),)))
    drawn = runner.collect()
    assert drawn is not None
    blocks = np.arange(-(-VOCAB // 4), dtype=np.uint32)
    # The prompt's only token has place 0, so this one has place 1.
    words = token_words(np.array([seed], np.uint64), np.array([1], np.uint32), blocks).reshape(-1)[:VOCAB]
    assert drawn.tokens[0] == (logits[0][0] + gumbel(uniform(words))).argmax()


def test_results_queue_up_to_the_depth(make_bench: MakeBench) -> None:
    runner = make_bench().runner(depth=2)
    assert runner.collect() is None
    runner.launch(one_token_batch([1]))
    runner.launch(one_token_batch([2]))
    with pytest.raises(RunnerError, match="2 launches are outstanding"):
        runner.launch(one_token_batch([3]))
    for _ in range(2):
        drawn = runner.collect()
        assert drawn is not None
        assert drawn.tokens.shape == (1,)
    assert runner.collect() is None
    runner.close()
    runner.close()


def test_the_cache_is_as_large_as_needed_and_memory_allows(make_bench: MakeBench) -> None:
    spec = make_bench().spec  # 2 layers, 2 KV heads of 16: 512 bytes a token
    assert choose_kv_pages(spec, max_sequences=3, context=100) == 3 * 7
    assert choose_kv_pages(spec, max_sequences=3, context=100, memory=16 * 512 * 5 + 1) == 5
    with pytest.raises(RunnerError, match="one page of this model takes 8192"):
        choose_kv_pages(spec, max_sequences=3, context=100, memory=8191)


def test_there_are_as_many_slots_as_states_fit() -> None:
    spec, one = HYBRIDS["Mamba-2"], HYBRIDS["Mamba-2"].state_bytes
    assert one == 3 * 4 * (3 * (6 * 20 + 2 * 2 * 24) + 6 * 24 * 20)
    assert [choose_slots(spec, count, memory=10 * one + 1) for count in (4, 5, 6)] == [4, 5, 5]
    assert choose_slots(PLAIN, 1000, memory=0) == 1000
    with pytest.raises(
        RunnerError, match=f"given {one:,} bytes, but those of one sequence take {2 * one:,} with"
    ):
        choose_slots(spec, 1, memory=one)


def test_a_piece_of_a_prompt_begins_on_the_grid(make_bench: MakeBench) -> None:
    bench = make_bench("Mamba-2")
    subject = Reference(bench.file, bench.spec, slots=1, kv_pages=8)
    text, pages = random_prompt(1, 80), Pages(1, 8)
    logits_of(subject, pages, [Chunk(0, text, 0, 10)], admit=True)
    with pytest.raises(RunnerError, match=r"begins at position 10: .* multiples of 64"):
        logits_of(subject, pages, [Chunk(0, text, 10, 20)], admit=False)


def test_an_fp8_cache_changes_logits_a_little_and_the_name_of_the_arithmetic(tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", "qwen2", layers=2))
    spec, text = read_spec(file), list(range(5, 45))
    rows = []
    for kv in KvFormat:
        subject = Reference(file, spec, kv=kv, slots=1, kv_pages=4)
        pages = Pages(1, 4)
        rows.append(logits_of(subject, pages, [Chunk(0, text, 0, 40, 40)], admit=True))
        assert subject.runner.arithmetic.kv == {KvFormat.ELEMENT: "f32", KvFormat.FP8: "fp8"}[kv]
    agreement = compare_logits(rows[1], rows[0])
    assert 0 < agreement.mean_kl < 0.02, agreement
