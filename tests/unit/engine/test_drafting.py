"""Drafts: what is guessed, how many steps a text then takes, and that not a token differs."""

from dataclasses import replace
from typing import Any

import pytest

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.worker.engine.draft_model import DraftModel
from nightmill.worker.engine.drafting import MOST_SEQUENCES
from nightmill.worker.engine.ngrams import FIRST_PAUSE, LONGEST_PAUSE, Guesses, Habits, Ngrams
from nightmill.worker.engine.request import Completion, Request, Sequence
from tests.support.engines import complete
from tests.support.one_by_one import OneByOne
from tests.unit.engine.by_definition import EOS, NARROW, Rule, next_token
from tests.unit.engine.scripted import (
    GuessingRunner,
    RepeatingRunner,
    ScriptedRunner,
    cyclic,
    hasty_model,
    make_engine,
    make_request,
)


def run(requests: list[Request], *, drafts: bool, **options: Any) -> tuple[dict[str, Completion], Any]:
    """What becomes of requests, and the engine's statistics."""
    engine = make_engine(RepeatingRunner(**options), drafts=drafts, token_budget=64)
    return complete(engine, requests), engine.stats


def test_what_followed_a_run_of_tokens_last_is_guessed() -> None:
    ngrams = Ngrams()
    assert list(ngrams.guess([1, 2, 3, 4, 1, 2, 3], 2)) == [4, 1]
    assert list(ngrams.guess([1, 2, 3, 4, 1, 2, 3, 9, 1, 2, 3], 4)) == [9, 1, 2, 3]
    assert list(ngrams.guess([1, 2, 3, 4, 1, 2, 3, 9, 1, 2, 3, 4], 5)) == [1, 2, 3, 9, 1]
    assert list(ngrams.guess([1, 2, 3, 4, 1, 2, 3, 9, 1, 2, 3, 4, 7], 5)) == []


def test_a_guess_goes_on_beyond_the_text() -> None:
    assert list(Ngrams().guess([8, 1, 2, 1, 2, 1, 2], 5)) == [1, 2, 1, 2, 1]
    assert list(Ngrams().guess([6, 6, 6, 6], 3)) == [6, 6, 6]


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 1, 1], [1, 2, 1, 2]])
def test_too_little_text_has_nothing_to_guess(text: list[int]) -> None:
    assert list(Ngrams().guess(text, 5)) == []


def test_who_guesses_wrong_pauses_ever_longer() -> None:
    guesses, text, pauses = Guesses(), [7] * 8, []
    for _ in range(8):
        assert list(guesses.at(text, 1)) == [7]
        guesses.learn(1, 0, len(text))
        pauses.append(guesses.again_from - len(text))
        assert guesses.at(text, 1) == ()
        text += [7] * pauses[-1]
    assert pauses == [min(FIRST_PAUSE << turn, LONGEST_PAUSE) for turn in range(8)]
    guesses.learn(3, 1, len(text))
    assert guesses.pause == FIRST_PAUSE


@pytest.mark.parametrize("depth", [1, 3])
def test_a_text_that_repeats_takes_a_few_steps(depth: int) -> None:
    plain, before = run([cyclic()], drafts=False, depth=depth)
    drafted, after = run([cyclic()], drafts=True, depth=depth)
    assert drafted == plain
    assert before.guessed_tokens == 0 and after.guessed_right > 25
    assert after.steps < before.steps / 2
    assert after.generated_tokens == before.generated_tokens


def test_wrong_guesses_cost_steps_and_no_token() -> None:
    """The prompt says how the text may go on; it goes on in another way."""
    request = replace(cyclic(tokens=20), prompt_ids=(1, 2, 3, 9, 9, 2, 3, 4, 9, 9, 3, 4, 5, 9, 9))
    plain, _ = run([request], drafts=False, depth=3)
    drafted, stats = run([request], drafts=True, depth=3)
    assert drafted == plain
    assert stats.guessed_tokens > stats.guessed_right


def test_a_draft_takes_no_place_of_another() -> None:
    """With a row for each sequence there is none for a guess."""
    requests = [cyclic(f"j{number}") for number in range(4)]
    _, full = run(requests, drafts=True, slots=4)
    assert full.guessed_tokens == 0
    _, roomy = run(requests, drafts=True, slots=16)
    assert roomy.guessed_right > 0


def test_nobody_guesses_while_many_run() -> None:
    requests = [cyclic(f"j{number}") for number in range(MOST_SEQUENCES + 1)]
    done, stats = run(requests, drafts=True, slots=64, kv_pages=512)
    assert len(done) == len(requests) and stats.guessed_tokens < 20  # as the last of them end


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 1}},
    ],
)
def test_draws_that_look_at_tokens_before_are_not_guessed(params: dict[str, Any]) -> None:
    _, stats = run([cyclic(**params)], drafts=True)
    assert stats.guessed_tokens == 0


def test_banned_words_are_not_guessed() -> None:
    _, stats = complete_with_stats([replace(cyclic("banned"), banned=((9, 9),))])
    assert stats.guessed_tokens == 0


def complete_with_stats(requests: list[Request], **options: Any) -> tuple[dict[str, Completion], Any]:
    """What becomes of requests with hashed tokens, and the engine's statistics."""
    engine = make_engine(ScriptedRunner(**options), drafts=True)
    return complete(engine, requests), engine.stats


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("min_tokens", [0, 25])
def test_tokens_that_a_constraint_forces_are_drafted(depth: int, min_tokens: int) -> None:
    requests = [
        make_request(f"j{seed}", rule=rule, seed=seed, max_tokens=40, min_tokens=min_tokens)
        for seed, rule in enumerate([*NARROW, *NARROW], start=1)
    ]
    engine = make_engine(ScriptedRunner(slots=16, depth=depth))
    plain = complete(engine, [fresh(one) for one in requests])
    drafted, stats = complete_with_stats([fresh(one) for one in requests], slots=16, depth=depth)
    assert drafted == plain
    assert stats.guessed_right > 20
    assert stats.steps < engine.stats.steps
    assert any(one.error for one in plain.values())  # where a constraint leaves nothing, behind guesses, too


def fresh(request: Request) -> Request:
    """The same with its constraint at the beginning."""
    assert isinstance(request.constraint, Rule)
    return replace(request, constraint=Rule(request.constraint.key))


def test_a_guess_that_a_constraint_does_not_allow_ends_a_draft() -> None:
    constraints, rule = OneByOne(), Rule(NARROW[0])
    forced = constraints.guess(rule, (), 4)
    assert rule.drawn == [] and len(forced) > 1
    assert constraints.guess(rule, [*forced[:1], EOS], 4) == forced
    assert constraints.ahead(rule, [*forced[:1], EOS]) is None


def test_what_followed_a_run_twice_in_texts_alike_is_guessed() -> None:
    habits = Habits()
    habits.read([1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert habits.guess([1, 2, 3, 4], 3) == []
    habits.read([1, 2, 3, 4, 5, 6, 9, 8], 0)
    assert habits.guess([0, 1, 2, 3, 4], 3) == [5, 6]
    assert habits.guess([0, 1, 2, 3, 4], 1) == [5]
    habits.read([1, 2, 3, 4, 9], 0)
    assert habits.guess([1, 2, 3, 4], 3) == []


def test_answers_under_one_constraint_are_guessed_from_each_other() -> None:
    """The second answer repeats the first: no word of its own says what comes."""
    asked = Constrained(ConstraintKind.REGEX, "anything")
    alike = [
        make_request(f"j{number}", (0, 1), rule=1, seed=9, max_tokens=40, min_tokens=40)
        for number in range(3)
    ]
    alike = [replace(one, constrained=asked) for one in alike]
    engine = make_engine(ScriptedRunner(), drafts=True)
    steps = []
    for request in alike:
        before = engine.stats.steps
        complete(engine, [request])
        steps.append(engine.stats.steps - before)
    assert steps[2] < steps[0] / 2


@pytest.mark.parametrize("depth", [1, 3])
def test_states_that_went_through_a_wrong_guess_are_taken_back(depth: int) -> None:
    """The scripted runner compares its states with the tokens that it reads in pages."""
    requests = [replace(cyclic("right"), prompt_ids=(0, 1, 2, 3, 4)), cyclic("alone", tokens=9)]
    requests.append(replace(cyclic(tokens=20), prompt_ids=(1, 2, 3, 9, 9, 2, 3, 4, 9, 9, 3, 4, 5, 9, 9)))
    states: dict[str, Any] = {"grid": 4, "snapshots": 8, "slots": 16, "depth": depth}
    plain, before = run(requests, drafts=False, **states)
    drafted, stats = run(requests, drafts=True, **states)
    assert drafted == plain
    assert stats.guessed_tokens > stats.guessed_right > 20
    assert stats.steps < before.steps


def test_without_places_for_copies_states_are_given_no_guesses() -> None:
    _, stats = run([cyclic()], drafts=True, grid=4, snapshots=1)
    assert stats.guessed_tokens == 0


@pytest.mark.parametrize("states", [{}, {"grid": 4, "snapshots": 16}], ids=["pages", "states"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_model_guesses_what_no_word_of_a_text_says(depth: int, states: dict[str, int]) -> None:
    requests = [make_request(f"j{seed}", seed=seed, max_tokens=40, ignore_eos=True) for seed in range(1, 5)]
    options: dict[str, Any] = {"slots": 32, "depth": depth, "kv_pages": 128, **states}
    plain = make_engine(ScriptedRunner(**options), token_budget=64)
    drafting = make_engine(ScriptedRunner(**options), drafts=True, token_budget=64)
    drafting.guess_by(hasty_model(64))
    assert complete(drafting, requests) == complete(plain, requests)
    assert drafting.stats.guessed_tokens > drafting.stats.guessed_right > 60
    assert drafting.stats.steps < 0.7 * plain.stats.steps
    drafting.close()


def test_a_model_reads_what_is_new_of_a_text_and_nothing_of_one_that_is_too_long() -> None:
    runner = GuessingRunner(slots=2)
    model = DraftModel(runner, context=20, token_budget=64)
    texts = [
        Sequence(make_request(seed=7), 1, [*range(12)], 40),
        Sequence(make_request(seed=8), 2, [1] * 30, 40),
    ]
    guesses = model.guess(texts, 4)
    text, drawn = [*range(12)], []
    for _ in range(4):
        drawn.append(next_token(7, text + drawn))
    assert guesses == [tuple(drawn), ()]
    before = sum(len(batch.tokens) for batch in runner.batches)
    texts[0].tokens += drawn[:2]
    assert len(model.guess(texts[:1], 1)[0]) == 1
    assert sum(len(batch.tokens) for batch in runner.batches) - before <= 2 + runner.page_size
