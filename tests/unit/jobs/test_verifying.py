"""Which rows a verification chooses, and where it says that two texts part."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.batches.verifying import Parting, Verdict, choose, compare, part
from nightmill.jobs.reply.job import Answer
from tests.unit.formats.files import job

IDS = [f"{number:032x}" for number in range(200)]
seeds = st.integers()


@given(st.sets(st.sampled_from(IDS)), st.integers(1, 250), seeds, st.randoms())
def test_a_sample_depends_on_its_seed_and_not_on_the_order_of_rows(
    ids: set[str], sample: int, seed: int, shuffled: random.Random
) -> None:
    chosen = choose(sorted(ids), sample, seed)
    assert chosen == sorted(set(chosen)) and set(chosen) <= ids
    assert len(chosen) == min(sample, len(ids))
    assert choose(sorted(ids, key=lambda _: shuffled.random()), sample, seed) == chosen


@given(st.integers(1, 100), st.integers(0, 100), seeds)
def test_a_larger_sample_has_all_rows_of_a_smaller_one(sample: int, more: int, seed: int) -> None:
    assert set(choose(IDS, sample, seed)) <= set(choose(IDS, sample + more, seed))


def test_every_row_comes_as_often_as_the_others() -> None:
    times = dict.fromkeys(IDS, 0)
    for seed in range(400):
        for job_id in choose(IDS, 50, seed):
            times[job_id] += 1
    assert min(times.values()) > 60 and max(times.values()) < 140  # 100 each, 8.7 their standard deviation


texts = st.text(alphabet="ab\n", max_size=80)


@given(texts, texts, texts)
def test_texts_part_after_their_last_equal_character(same: str, then: str, now: str) -> None:
    found = part(f"{same}x{then}", f"{same}y{now}")
    assert found.at == len(same)
    before = same[-24:]
    assert (found.then, found.now) == (before + f"x{then}"[:24], before + f"y{now}"[:24])


@given(texts, texts.filter(bool))
def test_a_text_that_goes_on_parts_where_the_other_ends(same: str, more: str) -> None:
    assert part(same, same + more).at == part(same + more, same).at == len(same)


def test_every_answer_is_compared() -> None:
    answers = (Answer("one", StopReason.EOS, 2, 7), Answer("two", StopReason.EOS, 3, 8))
    then = job(text="one", several=answers, arithmetic="a")
    assert compare(then.id, then, then).verdict is Verdict.EQUAL
    now = job(text="one", several=(answers[0], Answer("tea", StopReason.EOS, 3, 8)))
    found = compare(then.id, then, now)
    assert (found.verdict, found.parting) == (Verdict.UNRECORDED, Parting(1, "two", "tea"))
    cut = job(text="one", several=(answers[0], Answer("two", StopReason.LENGTH, 3, 8)))
    assert compare(then.id, then, cut).verdict is not Verdict.EQUAL


def test_another_prompt_explains_another_text() -> None:
    then = job(text="Monday", arithmetic="a", prompt_digest="1" * 16)
    now = job(text="Tuesday", arithmetic="a", prompt_digest="2" * 16)
    found = compare(then.id, then, now)
    assert found.verdict is Verdict.EXPLAINED
    assert found.differences[0].startswith(f"prompt: the tokens {'1' * 16}, now {'2' * 16}")
    same = compare(then.id, then, replace(now, prompt_digest="1" * 16))
    assert (same.verdict, same.differences) == (Verdict.DEFECT, ())


def test_an_older_row_has_only_the_number_of_its_prompts_tokens() -> None:
    then = job(text="Monday", arithmetic="a", prompt_tokens=12)
    found = compare(then.id, then, replace(then, text="Tuesday", prompt_tokens=14, prompt_digest="2" * 16))
    assert (found.verdict, found.differences) == (Verdict.EXPLAINED, ("prompt: 12 tokens, now 14",))
