"""The engine from submission to completion, on a scripted runner."""

from dataclasses import replace

import pytest

from nightmill.jobs.base.contract import PAST_CONTEXT, StopReason
from nightmill.jobs.errors import RunnerError
from tests.unit.engine.by_definition import EOS, PIECES, VOCAB, expected, expected_embedding, expected_records
from tests.unit.engine.scripted import Clock, ScriptedRunner, make_engine, make_request, run

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def scripted(script: list[int], depth: int = 1) -> ScriptedRunner:
    return ScriptedRunner(script=script, depth=depth)


@DEPTHS
def test_many_requests_get_the_answers_they_would_get_alone(depth: int) -> None:
    engine = make_engine(ScriptedRunner(depth=depth, kv_pages=40))
    requests = [
        make_request(
            f"j{n}", tuple(range(1 + n % 9)), seed=n, max_tokens=5 + n, stop=("aba", "é"), priority=n % 3
        )
        for n in range(40)
    ]
    for request in requests:
        engine.submit(request)
    done = {completion.job_id: completion for completion in run(engine)}
    assert len(done) == 40
    for request in requests:
        completion = done[request.job_id]
        assert (completion.token_ids, completion.text, completion.stop_reason) == expected(request, 64)
        assert completion.completion_tokens == len(completion.token_ids)
        assert completion.prompt_tokens == len(request.prompt_ids)
    assert engine.stats.free_pages == engine.stats.pages == 40
    assert engine.stats.generated_tokens == sum(completion.completion_tokens for completion in done.values())


@DEPTHS
def test_preempted_sequences_lose_nothing(depth: int) -> None:
    engine = make_engine(ScriptedRunner(depth=depth, kv_pages=9))
    requests = [make_request(f"j{n}", (n, n), seed=n, max_tokens=30, ignore_eos=True) for n in range(6)]
    for request in requests:
        engine.submit(request)
    done = {completion.job_id: completion for completion in run(engine)}
    assert engine.stats.preemptions > 0
    for request in requests:
        assert (done[request.job_id].token_ids, done[request.job_id].text) == expected(request, 36)[:2]


@DEPTHS
def test_eos_counts_as_a_token_but_is_no_text(depth: int) -> None:
    engine = make_engine(scripted([0, 1, EOS, 0, 0, 0], depth))
    engine.submit(make_request(seed=3))
    (completion,) = run(engine)
    assert completion.stop_reason is StopReason.EOS
    assert (completion.text, completion.token_ids, completion.completion_tokens) == ("ab", (0, 1, EOS), 3)


def test_eos_is_a_token_like_others_where_it_is_to_be_ignored() -> None:
    engine = make_engine(scripted([0, EOS, 1, 0]))
    engine.submit(make_request(seed=3, ignore_eos=True, max_tokens=3))
    (completion,) = run(engine)
    assert (completion.text, completion.stop_reason) == ("a!b", StopReason.LENGTH)


@DEPTHS
def test_a_stop_string_over_token_borders_ends_the_text_before_it(depth: int) -> None:
    engine = make_engine(scripted([0, 12, 13, 0, 0, 0], depth))
    engine.submit(make_request(seed=3, stop="STOP"))
    (completion,) = run(engine)
    assert (completion.text, completion.stop_reason) == ("a", StopReason.STOP_SEQUENCE)
    assert completion.completion_tokens == 3


def test_a_stop_string_of_characters_spread_over_tokens() -> None:
    engine = make_engine(scripted([0, 7, 8, 9, 5, 6]))
    engine.submit(make_request(seed=3, stop="€é"))
    (completion,) = run(engine)
    assert (completion.text, completion.stop_reason) == ("a", StopReason.STOP_SEQUENCE)


def test_text_held_back_is_kept_when_the_answer_ends_for_another_reason() -> None:
    engine = make_engine(scripted([0, 12]))
    engine.submit(make_request(seed=3, stop="STOP", max_tokens=2))
    (completion,) = run(engine)
    assert (completion.text, completion.stop_reason) == ("aST", StopReason.LENGTH)


@DEPTHS
def test_the_context_is_a_limit(depth: int) -> None:
    engine = make_engine(scripted([0] * 99, depth), context_length=10)
    engine.submit(make_request(seed=3))
    (completion,) = run(engine)
    assert completion.stop_reason is StopReason.CONTEXT_FULL
    assert completion.prompt_tokens + completion.completion_tokens == 10


def test_the_whole_kv_cache_is_a_context_too() -> None:
    engine = make_engine(ScriptedRunner(kv_pages=3, script=[0] * 99))
    engine.submit(make_request(seed=3))
    (completion,) = run(engine)
    assert (completion.stop_reason, completion.completion_tokens) == (StopReason.CONTEXT_FULL, 9)


@DEPTHS
@pytest.mark.parametrize("size", [9, 10, 11])
def test_a_text_to_score_may_fill_the_context(size: int, depth: int) -> None:
    """Nothing is drawn behind it that anybody is told of, so it needs no further token."""
    runner = ScriptedRunner(kv_pages=3, depth=depth)  # pages of 4: 12 tokens
    engine = make_engine(runner, context_length=10)
    prompt = tuple(range(10))[:size] if size <= 10 else (*range(10), 0)
    one = make_request(prompt=prompt, seed=4, prompt_logprobs_from=3, max_tokens=1, logprobs=2)
    engine.submit(replace(one, scores=True))
    (completion,) = run(engine)
    if size > 10:
        assert "the prompt, with what is scored behind it, has 11 tokens" in (completion.error or "")
        return
    assert completion.error is None and completion.logprobs is not None
    assert completion.logprobs.given == size - 3
    assert completion.logprobs.records == expected_records(one, completion.token_ids, 2)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ((), "the prompt has no tokens"),
        ((0, VOCAB), f"token id {VOCAB}, but this model's ids go from 0 to {VOCAB - 1}"),
        ((0, -1), "token id -1"),
        ((0,) * 64, f"the prompt has 64 tokens, which {PAST_CONTEXT}: this worker's context holds 64, "
                    "of which at least one must be left for the answer: shorten it or start the worker with "
                    "--context 320"),
        ((0,) * 20, f"the prompt has 20 tokens, which {PAST_CONTEXT}: this worker's KV cache holds 16 "
                    "(4 pages of 4)"),
    ],
)  # fmt: skip
def test_a_request_that_can_never_run_completes_with_an_error_that_helps(
    prompt: tuple[int, ...], says: str
) -> None:
    engine = make_engine(ScriptedRunner(kv_pages=4))
    engine.submit(make_request(prompt=prompt))
    (completion,) = run(engine)
    assert completion.stop_reason is StopReason.ERROR
    assert says in (completion.error or "")
    assert (completion.text, completion.token_ids, completion.prompt_tokens) == ("", (), len(prompt))


@DEPTHS
def test_cancel_keeps_what_there_is(depth: int) -> None:
    engine = make_engine(scripted([0] * 99, depth))
    engine.submit(make_request(seed=3))
    for _ in range(5):
        assert engine.step() == []
    engine.cancel("j")
    (completion,) = engine.step()
    assert completion.stop_reason is StopReason.CANCELLED
    assert completion.text == "a" * completion.completion_tokens
    assert completion.completion_tokens == 5 - (depth - 1)
    assert run(engine) == []
    assert engine.stats.free_pages == engine.stats.pages


def test_cancel_and_deadline_reach_a_prompt_in_the_middle_and_one_that_waits() -> None:
    clock = Clock()
    runner = ScriptedRunner(slots=2)
    engine = make_engine(runner, clock, token_budget=24)
    engine.submit(make_request("long", (0,) * 20))
    engine.submit(make_request("late", (1,) * 20, deadline=1001.0))
    engine.submit(make_request("waits", deadline=1002.0))
    engine.submit(make_request("unwanted"))
    assert engine.step() == []
    assert (engine.running, engine.waiting) == (2, 2)
    engine.cancel("long")
    engine.cancel("unwanted")
    engine.cancel("nobody")
    assert {(c.job_id, c.stop_reason) for c in engine.step()} == {
        ("long", StopReason.CANCELLED), ("unwanted", StopReason.CANCELLED),
    }  # fmt: skip
    clock.now = 1002.0
    assert {(c.job_id, c.stop_reason) for c in engine.step()} == {
        ("late", StopReason.DEADLINE), ("waits", StopReason.DEADLINE),
    }  # fmt: skip
    assert not engine.has_work
    assert len(runner.batches) == 2
    engine.check_integrity()


def test_a_deadline_in_the_past_computes_nothing() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner)
    engine.submit(make_request(deadline=1.0))
    (completion,) = run(engine)
    assert (completion.stop_reason, completion.completion_tokens, runner.batches) == (
        StopReason.DEADLINE,
        0,
        [],
    )


@DEPTHS
def test_a_newer_attempt_replaces_the_older_one(depth: int) -> None:
    engine = make_engine(scripted([0] * 99, depth))
    engine.submit(make_request(seed=3, attempt=1))
    engine.step()
    engine.submit(make_request(seed=3, attempt=2, max_tokens=4))
    engine.submit(make_request(seed=3, attempt=2, max_tokens=4))  # the same again: one request
    engine.submit(make_request(seed=3, attempt=1))  # late
    done = run(engine)
    assert [(c.attempt, c.stop_reason) for c in done] == [
        (1, StopReason.CANCELLED), (1, StopReason.CANCELLED), (2, StopReason.LENGTH),
    ]  # fmt: skip


def test_partial_shows_decided_text() -> None:
    engine = make_engine(scripted([0, 12, 1, 0, 0]))
    engine.submit(make_request(seed=3, stop="STOP"))
    engine.step()
    engine.step()
    partial = engine.partial("j")
    assert partial is not None
    assert (partial.text, partial.token_ids, partial.attempt, partial.prompt_tokens) == ("a", (0, 12), 1, 3)
    assert engine.partial("nobody") is None


@DEPTHS
def test_abandon_returns_what_each_had_and_leaves_the_engine_empty_and_usable(depth: int) -> None:
    runner = ScriptedRunner(depth=depth, slots=2, script=[0] * 99)
    engine = make_engine(runner)
    for name in ("a", "b", "c"):
        engine.submit(make_request(name, seed=3))
    for _ in range(4):
        engine.step()
    partials = {partial.job_id: partial for partial in engine.abandon()}
    assert set(partials) == {"a", "b", "c"}
    assert partials["a"].text == "a" * (5 - depth)
    assert partials["c"].text == ""
    assert not engine.has_work
    assert engine.stats.free_pages == engine.stats.pages
    engine.check_integrity()
    engine.submit(make_request("d", seed=3, max_tokens=2))
    assert [completion.text for completion in run(engine)] == ["aa"]


@DEPTHS
def test_after_a_runner_error_the_work_can_still_be_handed_back(depth: int) -> None:
    runner = ScriptedRunner(depth=depth, script=[0] * 99)
    runner.fail_at = 4
    engine = make_engine(runner)
    engine.submit(make_request("a", seed=3, max_tokens=2))
    engine.submit(make_request("b", seed=3))
    done = []
    with pytest.raises(RunnerError, match="scripted failure"):
        for _ in range(9):
            done += engine.step()
    assert [completion.job_id for completion in done] == ["a"]
    with pytest.raises(RunnerError, match="abandon the work"):
        engine.step()
    assert [partial.job_id for partial in engine.abandon()] == ["b"]
    assert not engine.has_work
    engine.check_integrity()


def test_completions_made_before_a_runner_error_are_not_lost() -> None:
    runner = ScriptedRunner(script=[0] * 99)
    runner.fail_at = 1
    engine = make_engine(runner)
    engine.submit(make_request("a", seed=3))
    engine.step()
    engine.cancel("a")
    engine.submit(make_request("b", seed=3))
    with pytest.raises(RunnerError):
        engine.step()
    assert [partial.job_id for partial in engine.abandon()] == ["b"]
    assert [(c.job_id, c.text) for c in engine.step()] == [("a", "a")]


def test_a_runner_that_fails_while_work_is_abandoned_loses_none_of_it() -> None:
    runner = ScriptedRunner(depth=2, script=[0] * 99)
    engine = make_engine(runner)
    engine.submit(make_request("a", seed=3))
    engine.step()

    def fail() -> None:
        raise RunnerError

    runner.collect = fail  # type: ignore[method-assign]
    assert [partial.job_id for partial in engine.abandon()] == ["a"]
    engine.check_integrity()
    assert engine.stats.free_pages == engine.stats.pages


def test_a_runner_that_loses_tokens_is_found_out() -> None:
    runner = ScriptedRunner()
    runner.collect = lambda: None  # type: ignore[method-assign]
    engine = make_engine(runner)
    engine.submit(make_request())
    with pytest.raises(RunnerError, match="other tokens"):
        engine.step()


def test_running_ahead_launches_before_it_collects_and_never_past_the_length() -> None:
    runner = scripted([0] * 99, depth=3)
    engine = make_engine(runner)
    engine.submit(make_request(seed=3, max_tokens=5))
    engine.step()
    engine.step()
    assert (len(runner.batches), len(runner.queue), engine.stats.generated_tokens) == (2, 2, 0)
    (completion,) = run(engine)
    assert len(runner.batches) == completion.completion_tokens == 5


def test_tokens_drawn_past_a_stop_are_dropped() -> None:
    runner = scripted([0, EOS, 1, 1, 1, 1, 1], depth=3)
    engine = make_engine(runner)
    engine.submit(make_request(seed=3))
    (completion,) = run(engine)
    assert completion.token_ids == (0, EOS)
    assert len(runner.batches) > 2
    assert engine.stats.generated_tokens == 2


def test_prompts_are_prefilled_in_one_launch_each_and_counted() -> None:
    runner = ScriptedRunner(script=[0] * 99)
    engine = make_engine(runner)
    for n in range(3):
        engine.submit(make_request(f"j{n}", (n,) * 7, seed=7, max_tokens=2))
    run(engine)
    assert [len(batch.tokens) for batch in runner.batches] == [21, 3]
    assert engine.stats.prompt_tokens == 21
    assert engine.stats.steps == 2


def test_more_sequences_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="max_sequences is 9, but the runner has 8 slots"):
        make_engine(ScriptedRunner(), max_sequences=9)
    with pytest.raises(ValueError, match="a context of 1"):
        make_engine(ScriptedRunner(), context_length=1)


def test_every_answer_depends_on_its_own_prompt_and_seed() -> None:
    engine = make_engine(ScriptedRunner())
    for n in range(8):
        engine.submit(make_request(f"j{n}", (n, 1), seed=9, max_tokens=20, ignore_eos=True))
        engine.submit(make_request(f"k{n}", (0, 1), seed=n, max_tokens=20, ignore_eos=True))
    done = run(engine)
    assert len({completion.text for completion in done}) >= 15
    assert len(PIECES) == VOCAB


def test_as_many_texts_are_embedded_in_a_step_as_sequences_fit() -> None:
    """None of them draws, so the row of each that would is for its embedding."""
    runner = ScriptedRunner(slots=8)
    engine = make_engine(runner)
    for number in range(8):
        engine.submit(make_request(str(number), (number, 1, 2), embeds=range(2, 3), embed=True))
    assert {one.embedding is None for one in run(engine)} == {False}
    assert engine.stats.steps == 1
    longer = make_request("longer", tuple(range(12)), embeds=range(12), embed=True)
    engine.submit(longer)
    (done,) = run(engine)
    assert done.embedding == expected_embedding(longer)
    pooled = [int(batch.pools["rows"].sum()) for batch in runner.batches[1:]]
    assert pooled == [9, 3]  # one for itself, seven of idle sequences, and one more
