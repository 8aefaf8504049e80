"""An answer behind thoughts that the prompt has opened is what its row asks for, and thoughts are free."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from nightmill.jobs.base.contract import CallFormat, Markup, StopReason, Tools
from nightmill.jobs.reply.parsing import read_reply
from nightmill.jobs.reply.reasoning import CHANNELS, GEMMA
from nightmill.jobs.reply.structure import closing_of
from nightmill.jobs.reply.tool_calls import KNOWN
from nightmill.jobs.request.structured import constrained_by
from nightmill.worker.engine.request import ClosingTokens
from nightmill.worker.grammar.calls import calls_asked
from nightmill.worker.grammar.checker import Checker, CheckerLimits
from nightmill.worker.grammar.source import complete
from nightmill.worker.grammar.thoughts import FINAL, START, behind_thoughts
from tests.support.constrained import Constrained
from tests.support.ggufs import CHATML, byte_vocabulary, write_model
from tests.support.walking import BYTES, walk

END = "</think>"
MARKS = ("<think>", END)
MARKUP = Markup(thinking=MARKS, opened=True)
ASKED: list[dict[str, Any]] = [
    {"json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                     "additionalProperties": False}},
    {"regex": "[a-c]{2}"},
    {"choice": ["yes", "no }"]},
    {"grammar": 'root ::= "x" [0-9] # }\n'},
    {"grammar": 'start: A\nA: "x" /[0-9]/'},
]  # fmt: skip
LOOK_UP = Tools([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], True)


def is_one(asked: dict[str, Any], content: str) -> bool:
    match asked:
        case {"json_schema": _}:
            return isinstance(json.loads(content)["a"], bool)
        case {"regex": _}:
            return len(content) == 2 and set(content) <= set("abc")
        case {"choice": choices}:
            return content in choices
    return len(content) == 2 and content[0] == "x" and content[1].isdigit()


@pytest.mark.parametrize("as_token", [True, False])
def test_every_finished_answer_is_what_is_asked(tmp_path: Path, as_token: bool) -> None:
    extra = [(END, 3)] if as_token else []
    vocabulary = byte_vocabulary(extra=extra)
    path = write_model(tmp_path / "m.gguf", vocabulary=vocabulary, chat_template="{{ '</think>' }}" + CHATML)
    with Constrained(path) as model:
        end = [model.vocabulary.tokens.index(END)] if as_token else list(END.encode())
        requests = []
        for number in range(20):
            asked = ASKED[number % len(ASKED)]
            one = model.request(
                str(number), number, asked, max_tokens=150, logit_bias={end[0]: 5.0 * as_token}
            )
            assert one.constrained is not None
            drawn = () if as_token or number < 5 else (*b"hm {", *end)
            behind = behind_thoughts(one.constrained, MARKS, opened=True)
            requests.append(replace(one, constrained=behind, markup=MARKUP, generated_ids=drawn))
        done = model.run(requests)
    finished = 0
    for number in range(20):
        one = done[str(number)]
        assert one.error is None
        assert one.stop_reason in (StopReason.EOS, StopReason.LENGTH)
        if one.stop_reason is StopReason.EOS:
            finished += 1
            reply = read_reply(one.text, MARKUP, None, "j")
            assert is_one(ASKED[number % len(ASKED)], reply.content), one.text
    assert finished >= 12


@pytest.fixture(scope="module")
def checker() -> Any:
    made = Checker(CheckerLimits())
    yield made
    made.close()


@pytest.mark.parametrize("asked", ASKED, ids=[next(iter(asked)) for asked in ASKED])
def test_a_mark_may_be_spelt_and_end_in_the_middle_of_a_token(
    checker: Checker, asked: dict[str, Any]
) -> None:
    inner = constrained_by(asked)
    assert inner is not None
    lark = checker.check(behind_thoughts(inner, MARKS, opened=True))
    matcher = LLMatcher(BYTES, complete(lark), log_level=0)
    thoughts = f'I think }} {{ "a" <{END}\n\n'.encode()
    assert matcher.try_consume_tokens(list(thoughts[:-12])) == len(thoughts) - 12
    assert not matcher.is_accepting()  # a text cannot end in its thoughts
    assert matcher.try_consume_tokens(list(thoughts[-12:])) == 12
    for seed in range(40):
        text = walk(matcher, random.Random(seed), 100)
        assert text is not None
        assert is_one(asked, read_reply((thoughts + text).decode(), MARKUP, None, "j").content)


@pytest.mark.parametrize(
    ("thinking", "before"),
    [
        (MARKS, ("", "<think>\nI think } <think>\n</think>\n\n")),
        (GEMMA, ("", "<|channel>thought\nhm <channel> \n<channel|>")),
        (
            CHANNELS,
            (
                FINAL,
                f"{CHANNELS[0]}hm <|channel|>{CHANNELS[1]}",
                f"{CHANNELS[0]}hm<|end|>{START}{CHANNELS[0]}{FINAL}{CHANNELS[1]}",
            ),
        ),
    ],
    ids=["think", "gemma", "harmony"],
)
@pytest.mark.parametrize("asked", ASKED, ids=[next(iter(asked)) for asked in ASKED])
def test_a_model_that_thinks_by_itself_may_do_so_or_not(
    checker: Checker, asked: dict[str, Any], thinking: tuple[str, str], before: tuple[str, ...]
) -> None:
    inner = constrained_by(asked)
    assert inner is not None
    markup = Markup(thinking=thinking)
    grammar = complete(checker.check(behind_thoughts(inner, thinking, opened=False)))
    for thoughts in before:
        matcher = LLMatcher(BYTES, grammar, log_level=0)
        assert matcher.try_consume_tokens(list(thoughts.encode())) == len(thoughts.encode())
        assert not matcher.is_accepting()
        for seed in range(10):
            text = walk(matcher, random.Random(seed), 100)
            if text is None:  # it has begun to think, and not ended
                assert not thoughts
                continue
            reply = read_reply(thoughts + text.decode(errors="replace"), markup, None, "j")
            assert is_one(asked, reply.content), (thoughts, text)
            assert (reply.reasoning is not None) == (
                "hm" in thoughts or "I think" in thoughts
            ) or not thoughts


@pytest.mark.parametrize("written", sorted(KNOWN, key=str))
def test_calls_follow_thoughts(checker: Checker, written: CallFormat) -> None:
    lark = checker.check(behind_thoughts(calls_asked(LOOK_UP, written), MARKS, opened=True))
    matcher = LLMatcher(BYTES, complete(lark), log_level=0)
    assert np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8).any()
    assert matcher.try_consume_tokens(list(f"hm{END}\n".encode())) == 3 + len(END)
    reached = 0
    for seed in range(20):
        text = walk(matcher, random.Random(seed), 400)
        if text is not None:
            reached += 1
            said = f"hm{END}\n{text.decode(errors='replace')}"
            reply = read_reply(said, replace(MARKUP, calls=written), LOOK_UP, "j")
            assert reply.tool_calls and reply.content == "" and reply.reasoning == "hm"
    assert reached > 3


def test_a_fault_names_what_the_row_says(checker: Checker) -> None:
    inner = constrained_by({"grammar": "start: nothing\n"})
    assert inner is not None
    with pytest.raises(Exception, match=r"^grammar: .*nothing"):
        checker.check(behind_thoughts(inner, MARKS, opened=True))


def test_a_budget_closes_thoughts_before_a_structured_answer(tmp_path: Path) -> None:
    """The closing tokens are such as the constraint takes: in thoughts, or in place of them."""
    path = write_model(tmp_path / "m.gguf", chat_template="{{ '</think>' }}" + CHATML)
    for thinking, opened, budget in (
        (MARKS, True, 6), (MARKS, True, 0), (MARKS, False, 0), (CHANNELS, False, 0), (GEMMA, False, 0),
    ):  # fmt: skip
        closing = ClosingTokens(*(tuple(text.encode()) for text in closing_of(thinking)))
        markup = Markup(thinking=thinking, opened=opened)
        with Constrained(path) as model:
            requests = []
            for number in range(3):
                one = model.request(str(number), number, ASKED[1], max_tokens=80, max_reasoning_tokens=budget)
                assert one.constrained is not None
                behind = behind_thoughts(one.constrained, thinking, opened=opened)
                requests.append(replace(one, constrained=behind, markup=markup, closing=closing))
            done = model.run(requests)
        for one in done.values():
            assert (one.stop_reason, one.error) == (StopReason.EOS, None), one
            tokens = closing[not opened]
            starts = range(budget, budget + 4)  # not in the middle of a character
            assert any(one.token_ids[start : start + len(tokens)] == tokens for start in starts)
            assert is_one(ASKED[1], read_reply(one.text, markup, None, "j").content)
