"""What the engine is asked for a claimed job."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from nightmill.jobs.base.contract import (
    CallFormat,
    Constrained,
    ConstraintKind,
    Markup,
    Rendering,
    Tools,
)
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Claim
from nightmill.worker.engine.request import ClosingTokens, Request
from nightmill.worker.grammar.thoughts import of_answer
from nightmill.worker.service.answering import Answering
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.requesting import Requesting
from tests.unit.engine.scripted import ARITHMETIC
from tests.unit.worker.bench import ScriptedPrompting

MARKS = ("<think>", "</think>")
CHOICE = Constrained(ConstraintKind.CHOICE, '["a"]')
LOOK_UP = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
KEY = ("j", 1)


class WithMarkup(ScriptedPrompting):
    def __init__(self, markup: Markup | None) -> None:
        self._markup = markup

    def markup(self, claim: Claim, prompt_ids: tuple[int, ...]) -> Markup | None:
        return self._markup


def asked(markup: Markup | None, **claim: Any) -> tuple[Request, Markup | None]:
    """The request of a chat with this markup, and what its texts are read by."""
    in_flight = InFlight(4)
    reserved = in_flight.reserve(1)
    params = claim.pop("params", GenerationParams(seed=1))
    made = Claim("j", 1, None, [{"role": "user", "content": "x"}], params, 5, None, **claim)
    assert in_flight.fill(reserved, [made])

    requesting = Requesting(
        in_flight,
        Answering(in_flight, lambda token: (b"", "")),
        WithMarkup(markup),
        arithmetic=lambda: ARITHMETIC,
        now=lambda: datetime.now(UTC),
    )
    (request,) = requesting.requests(made, (1, 2))
    return request, in_flight.markup(KEY)


@pytest.mark.parametrize("opened", [True, False])
def test_an_answer_that_must_be_something_follows_thoughts(opened: bool) -> None:
    markup = Markup(thinking=MARKS, opened=opened)
    request, read_by = asked(markup, constrained=CHOICE)
    assert request.constrained is not None
    assert of_answer(request.constrained) == (CHOICE, "</think>")
    assert request.markup == read_by == markup
    request, read_by = asked(replace(markup, opened=False, closed=True), constrained=CHOICE)
    assert request.constrained == CHOICE and request.markup == read_by == Markup()


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_calls_follow_thoughts(opened: bool, required: bool) -> None:
    markup = Markup(CallFormat.HERMES, MARKS, opened)
    request, read_by = asked(markup, rendering=Rendering(tools=Tools(LOOK_UP, required)))
    assert request.constrained is not None
    calls, end = of_answer(request.constrained)
    assert (calls.kind, end) == (ConstraintKind.CALLS, "</think>" if opened or required else "")
    assert read_by == markup


def test_the_engine_knows_the_marks_of_a_free_answer() -> None:
    markup = Markup(thinking=MARKS)
    request, _ = asked(markup)
    assert request.markup == markup and request.constrained is None


def test_a_budget_of_thoughts_brings_what_closes_them() -> None:
    limited = {"params": GenerationParams(seed=1, max_reasoning_tokens=5)}
    markup = Markup(thinking=MARKS)
    assert asked(markup, **limited)[0].closing == ClosingTokens((0,), (1, 0))
    assert asked(markup)[0].closing is None
    assert asked(Markup(), **limited)[0].closing is None
    assert asked(replace(markup, closed=True), **limited)[0].closing is None
