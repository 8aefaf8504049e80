"""The reference runner through the engine: the right tokens, whatever the batch, the chunks and the pages."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.reference import choose_kv_pages, choose_slots
from tests.support.comparing import compare_logits
from tests.support.driving import Chunk, Pages, Reference, logits_of
from tests.support.float64_oracle import straightforward_logits
from tests.support.ggufs import write_model
from tests.support.specs import GEMMAS, HYBRIDS, MIXTURES, PLAIN, VARIANTS
from tests.unit.runners.reference_bench import (
    MODELS,
    VOCAB,
    Array,
    MakeBench,
    mixed_requests,
    one_token_batch,
    random_prompt,
    request,
)


def names(spec: ModelSpec) -> list[str]:
    return [name for _, weight in spec.all_weights() for name in weight.names]


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
