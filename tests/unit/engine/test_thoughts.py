"""What is asked of the answer acts on the answer, where the text begins with thoughts."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightmill.jobs.base.contract import Markup, StopReason
from nightmill.jobs.reply.parsing import read_reply
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.request import ClosingTokens, Completion, Request
from nightmill.worker.engine.stops import TextWatch
from tests.unit.engine.by_definition import PIECES, PieceStream, first_stop, stable_prefix, text_of
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request, run

A, B, AB, SPACE, E_ACUTE, STOP = 0, 1, 2, 4, 10, 11  # of PIECES
OPENED = Markup(thinking=("b", "é"), opened=True)
BY_ITSELF = Markup(thinking=("b", "é"))


def scripted(script: list[int], markup: Markup, banned: Any = (), **params: object) -> Completion:
    """The answer of a runner that draws this script unless a mask forbids it."""
    engine = make_engine(ScriptedRunner(script=script))
    request = make_request("j", (0, 1, 2), seed=3, **params)
    engine.submit(replace(request, markup=markup, banned=banned))
    (one,) = run(engine)
    return one


@pytest.mark.parametrize("markup", [OPENED, BY_ITSELF])
@pytest.mark.parametrize(
    ("script", "text", "tokens"),
    [
        ([B, A, E_ACUTE, B, A, B], "baéb", 5),  # "a" in thoughts is not a stop
        ([B, A, E_ACUTE, SPACE, AB], "baé ", 5),
        ([B, A, 5, 6, A, B], "baé", 5),  # the mark in two tokens
    ],
)
def test_a_stop_string_in_thoughts_ends_nothing(
    markup: Markup, script: list[int], text: str, tokens: int
) -> None:
    one = scripted(script, markup, stop=["a"], max_tokens=len(script))
    assert (one.text, len(one.token_ids), one.stop_reason) == (text, tokens, StopReason.STOP_SEQUENCE)


def test_white_space_before_the_answer_is_not_searched() -> None:
    one = scripted([A, E_ACUTE, SPACE, SPACE, A, SPACE, SPACE, A], OPENED, stop=["  "], max_tokens=8)
    assert (one.text, one.stop_reason) == ("aé  a", StopReason.STOP_SEQUENCE)


def test_a_text_without_thoughts_is_all_answer() -> None:
    one = scripted([A, B, E_ACUTE], BY_ITSELF, stop=["a"], max_tokens=3)
    assert (one.text, one.stop_reason) == ("", StopReason.STOP_SEQUENCE)


def test_a_stop_string_that_has_a_mark_counts_in_thoughts() -> None:
    one = scripted([A, B, E_ACUTE, A], OPENED, stop=["é", "zz"], max_tokens=4)
    assert (one.text, one.stop_reason) == ("ab", StopReason.STOP_SEQUENCE)


def in_one_engine(requests: Iterable[Request], depth: int = 1) -> list[Completion]:
    """The texts of requests that are computed together, in their order."""
    engine = make_engine(ScriptedRunner(depth=depth, slots=8, kv_pages=64))
    asked = [replace(request, job_id=f"j{number}") for number, request in enumerate(requests)]
    for one in asked:
        engine.submit(one)
    done = {one.job_id: one for one in run(engine)}
    return [done[one.job_id] for one in asked]


@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_ends_a_text_before_its_answer_has_so_many_tokens(depth: int) -> None:
    asked = [make_request("j", (0, 1, 2), seed=seed, min_tokens=4, max_tokens=50) for seed in range(40)]
    for one in in_one_engine((replace(each, markup=OPENED) for each in asked), depth):
        reply = read_reply(one.text, OPENED, None, "j")
        if one.stop_reason is StopReason.EOS:
            end = next(
                n for n in range(len(one.token_ids)) if "é" in stable_prefix([*one.token_ids[: n + 1]])
            )
            assert len(one.token_ids) - end - 2 >= 4, reply


@pytest.mark.parametrize("depth", [1, 3])
def test_banned_runs_are_kept_from_the_answer_alone(depth: int) -> None:
    banned = ((A, B), (AB,))
    seen = 0
    asked = [make_request("j", (0, 1, 2), seed=seed, max_tokens=40, ignore_eos=True) for seed in range(40)]
    for one in in_one_engine((replace(each, markup=OPENED, banned=banned) for each in asked), depth):
        tokens = list(one.token_ids)
        ends = [n + 1 for n in range(len(tokens)) if "é" in stable_prefix(tokens[: n + 1])]
        thoughts, answer = (tokens[: ends[0]], tokens[ends[0] :]) if ends else (tokens, [])
        pairs = list(pairwise(answer))
        assert AB not in answer and (A, B) not in pairs
        seen += AB in thoughts
    assert seen > 5  # they are in thoughts


@given(
    st.lists(st.integers(0, len(PIECES) - 2), max_size=24),
    st.lists(st.sampled_from(["ab", "ba", "STOP", "ST", "a", "  ", "aé", "\ufffd"]), min_size=1, max_size=3),
    st.sampled_from([("b", "é"), ("STOP", "ab"), ("ab", "€")]),
    st.booleans(),
)
def test_the_first_stop_string_of_the_answer_ends_the_text(
    tokens: list[int], stop: list[str], marks: tuple[str, str], opened: bool
) -> None:
    """By definition: the whole text is read, and stop strings are looked for in its answer."""
    markup = Markup(thinking=marks, opened=opened)
    stop = [one for one in stop if not any(mark in one for mark in marks)]
    watch = TextWatch(PieceStream(), tuple(stop), thinking=(*marks, opened))
    for count, token in enumerate(tokens, 1):
        if watch.push(token):
            whole, stopped = stable_prefix(tokens[:count]), True
            break
        assert watch.text == stable_prefix(tokens[:count])
    else:
        whole, stopped = text_of(tokens), watch.finish()
    content = read_reply(whole, markup, None, "j").content
    place = first_stop(content, tuple(stop)) if stop else None
    assert stopped == (place is not None)
    if stopped:
        assert read_reply(watch.text, markup, None, "j").content == content[:place]


def test_params_without_an_answer_to_tell_apart_cost_nothing() -> None:
    request = replace(make_request(), markup=OPENED)
    assert request.thinking is None
    assert replace(request, params=GenerationParams(stop=("a",))).thinking == ("b", "é", True)


CLOSING = ClosingTokens((SPACE, E_ACUTE, SPACE), (B, E_ACUTE))


def limited(seed: int, budget: int | None, markup: Markup, name: str = "j", **asked: Any) -> Request:
    """A request whose thoughts have a budget."""
    request = make_request(name, (0, 1, 2), seed=seed, max_reasoning_tokens=budget, **asked)
    return replace(request, markup=markup, closing=None if budget is None else CLOSING)


def done(request: Request, *others: Request, depth: int = 1, pages: int = 64) -> Completion:
    engine = make_engine(ScriptedRunner(depth=depth, kv_pages=pages))
    for one in (request, *others):
        engine.submit(one)
    return next(one for one in run(engine) if one.job_id == request.job_id)


@pytest.mark.parametrize(
    ("markup", "budget"), [(OPENED, 0), (OPENED, 1), (OPENED, 7), (BY_ITSELF, 0), (BY_ITSELF, 4)]
)
def test_thoughts_are_closed_after_their_budget_and_an_answer_follows(markup: Markup, budget: int) -> None:
    closed = 0
    unlimited, cut = (
        in_one_engine(limited(seed, limit, markup, max_tokens=40, ignore_eos=True) for seed in range(30))
        for limit in (None, budget)
    )
    for free, one in ((a.token_ids, b.token_ids) for a, b in zip(unlimited, cut, strict=True)):
        watch = TextWatch(PieceStream(), (), thinking=(*markup.thinking, markup.opened))
        assert one[:budget] == free[:budget]
        place = None
        for count, token in enumerate(one):
            if count >= budget and (watch.closable or not (markup.opened or budget)):
                place = count
                break
            watch.push(token)
        if place is None:  # they were over before
            continue
        closed += 1
        tokens = CLOSING.before if not place and not markup.opened else CLOSING.inside
        assert one[place : place + len(tokens)] == tokens
        assert not read_reply(text_of(list(one)), markup, None, "j").unfinished
    assert closed > (0 if budget > 3 else 5)


@settings(max_examples=25)
@given(
    st.integers(0, 2**32), st.integers(0, 20), st.sampled_from([OPENED, BY_ITSELF]), st.integers(1, 3),
    st.sampled_from([12, 64]), st.sampled_from([{}, {"stop": ["ab"]}, {"min_tokens": 3}]),
)  # fmt: skip
def test_a_budget_holds_to_the_bit_however_often_a_text_is_interrupted(
    seed: int, budget: int, markup: Markup, depth: int, pages: int, asked: dict[str, Any]
) -> None:
    asked = {"max_tokens": 24} | asked
    whole = done(limited(seed, budget, markup, **asked))
    others = [limited(seed + n, budget, markup, f"o{n}", max_tokens=24) for n in range(1, 6)]
    again = done(limited(seed, budget, markup, **asked), *others, depth=depth, pages=pages)
    assert replace(again, cached_tokens=whole.cached_tokens) == whole
    for known in range(0, len(whole.token_ids) + 1, 4):
        resumed = limited(seed, budget, markup, generated=whole.token_ids[:known], **asked)
        assert done(resumed, depth=depth, pages=pages) == whole
