"""What is asked of the answer acts on the answer, where the text begins with thoughts."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.contract import Markup, StopReason
from nightmill.jobs.reply.parsing import read_reply
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.request import Completion
from nightmill.worker.engine.stops import TextWatch
from tests.unit.engine.scripted import (
    PIECES,
    PieceStream,
    ScriptedRunner,
    first_stop,
    make_engine,
    make_request,
    run,
    stable_prefix,
    text_of,
)

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


@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_ends_a_text_before_its_answer_has_so_many_tokens(depth: int) -> None:
    for seed in range(40):
        engine = make_engine(ScriptedRunner(depth=depth, kv_pages=64))
        asked = make_request("j", (0, 1, 2), seed=seed, min_tokens=4, max_tokens=50)
        engine.submit(replace(asked, markup=OPENED))
        (one,) = run(engine)
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
    for seed in range(40):
        engine = make_engine(ScriptedRunner(depth=depth, kv_pages=64))
        asked = make_request("j", (0, 1, 2), seed=seed, max_tokens=40, ignore_eos=True)
        engine.submit(replace(asked, markup=OPENED, banned=banned))
        (one,) = run(engine)
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
