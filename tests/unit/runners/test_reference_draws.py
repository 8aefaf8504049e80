"""What the reference runner draws from its logits: masks, penalties, bans and seeds."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.runners.base import NOT_A_NUMBER, Admission, mask_words
from nightmill.worker.runners.philox import token_words, uniform
from nightmill.worker.runners.sampling import gumbel
from tests.support.constraints import EveryNth
from tests.unit.runners.reference_bench import (
    VOCAB,
    Array,
    MakeBench,
    mixed_requests,
    one_token_batch,
    random_prompt,
    request,
)


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
