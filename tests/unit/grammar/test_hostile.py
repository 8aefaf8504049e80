"""Strangers' schemas, expressions and grammars fail their own rows, in bounded time, and nothing else."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from nightmill.jobs.base.contract import Constrained as Asked
from nightmill.jobs.base.contract import ConstraintKind, StopReason
from nightmill.jobs.errors import ConstraintError, InvalidParameterError, RunnerError
from nightmill.jobs.request.schemas import REFUSED
from nightmill.worker.engine.constraints import STUCK
from nightmill.worker.grammar import CheckerLimits, Grammar, matcher
from nightmill.worker.grammar.checker import Checker, ParserLimits, _Child
from nightmill.worker.grammar.source import lark_of_schema
from tests.support.constrained import QUICK, Constrained
from tests.support.ggufs import write_model
from tests.support.schemas import hostile

pytestmark = pytest.mark.heavy

HOSTILE = int(os.environ.get("NIGHTMILL_TEST_HOSTILE", "240"))
"""How many are tried; the whole sample has 2,000."""
STEP_SECONDS = 5.0  # on a machine with other things to do; the parser's limits for a step are some 15 ms


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Constrained]:
    with Constrained(write_model(tmp_path_factory.mktemp("model") / "bytes.gguf")) as made:
        yield made


def free(model: Constrained, count: int) -> list[Any]:
    return [
        replace(model.request(f"free {seed}", seed, {"regex": "x"}, max_tokens=60), constrained=None)
        for seed in range(count)
    ]


def test_none_of_many_stops_a_worker_or_holds_up_its_steps(model: Constrained) -> None:
    requests = []
    for place, asked in enumerate(hostile(seed=19, count=HOSTILE)):
        try:
            requests.append(model.request(str(place), place, dict(asked), max_tokens=40))
        except InvalidParameterError as error:
            assert error.field  # refused at enqueue, by name
    assert len(requests) > HOSTILE // 2
    innocent = free(model, 4)
    alone = model.run(innocent, slots=40)
    model.slowest = 0.0
    done = model.run([*innocent, *requests], slots=40)
    assert len(done) == len(requests) + 4
    assert {name: done[name].token_ids for name in alone} == {n: one.token_ids for n, one in alone.items()}
    reasons = {one.stop_reason for one in done.values()}
    assert reasons == {StopReason.EOS, StopReason.LENGTH, StopReason.ERROR}
    for one in done.values():
        assert (one.stop_reason is StopReason.ERROR) == bool(one.error)
        assert "\n" not in (one.error or "") and "backtrace" not in (one.error or "")
    assert model.slowest < STEP_SECONDS


CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(8000)) + '\na8000: "x"'


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"grammar": CHAIN}, "is too much for the parser (SIGSEGV"),
        ({"json_schema": {"type": "integer", "multipleOf": 99_999_999}}, "more than 0.5 s of processor time"),
        ({"json_schema": {"type": "strin"}}, "json_schema: Invalid type: strin"),
        ({"json_schema": {"type": "string", "format": "colour"}}, "json_schema: Unknown format: colour"),
        ({"json_schema": {"type": "array", "minItems": 3, "maxItems": 2}}, "minItems (3) is greater"),
        ({"json_schema": {"oneOf": [{"type": "null"}, {}]}}, "are not supported. write anyOf"),
        ({"json_schema": {"$ref": "http://example.org/schema"}}, "http://example.org/schema"),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no answer can obey it"),
        ({"regex": "(?=a)b"}, "regex: look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": r"(a)\1"}, "regex: backreferences are not supported"),
        ({"regex": "("}, "regex: unclosed group"),
        ({"grammar": "nonsense ="}, "is neither Lark nor GBNF: give it a rule 'root ::= ...' for GBNF"),
        ({"grammar": 'start: "a" b'}, 'unknown name: "b"'),
        ({"grammar": 'start: <|im_end|> "x"'}, "names tokens of the model, with which no answer is spelt"),
        ({"grammar": "root ::= " + "(" * 3000}, "line 1, column 138, in the rule 'root': parentheses are"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_an_error_that_says_why(
    asked: dict[str, Any], said: str, model: Constrained
) -> None:
    with Constrained(model.file.path, replace(QUICK, seconds=0.5)) as strict:
        done = strict.run([strict.request("bad", 1, asked), *free(strict, 1)])
    assert done["bad"].stop_reason is StopReason.ERROR
    assert said in (done["bad"].error or "")
    assert done["free 0"].error is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ConstraintKind.JSON_SCHEMA, "[1]"),
        (ConstraintKind.JSON_SCHEMA, "{"),
        (ConstraintKind.CHOICE, "5"),
        (ConstraintKind.CHOICE, '{"a": 1'),
        (ConstraintKind.read("rhyme"), "ABAB"),
    ],
)
def test_a_row_that_no_client_wrote_fails_alone(kind: ConstraintKind, text: str, model: Constrained) -> None:
    strange = replace(free(model, 1)[0], job_id="strange", constrained=Asked(kind, text))
    done = model.run([strange, *free(model, 1)])
    assert f"{kind}: cannot be read: " in (done["strange"].error or "")
    assert done["free 0"].error is None


def test_what_nobody_expected_of_the_compiler_fails_one_row(
    model: Constrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: Checker, asked: Asked) -> str:
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(Checker, "check", check)
    done = model.run([model.request("j", 1, {"choice": ["never before"]}), *free(model, 1)])
    assert "could not be followed: ZeroDivisionError: of its own" in (done["j"].error or "")
    assert done["free 0"].error is None


@pytest.mark.parametrize("kills", [1, 2])
def test_a_process_that_others_end_convicts_no_grammar(
    kills: int, model: Constrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does if memory is short: two tries, and the next row with the same words has its own."""
    ask, left = Checker._ask, kills

    def killed(self: Checker, question: bytes) -> dict[str, str]:
        nonlocal left
        if left:
            left -= 1
            self._child = self._child or _Child(self._limits)
            os.kill(self._child.process.pid, signal.SIGKILL)
        return ask(self, question)

    monkeypatch.setattr(Checker, "_ask", killed)
    with Constrained(model.file.path) as fresh:
        (first,) = fresh.run([fresh.request("first", 1, {"choice": ["a"]})]).values()
        (second,) = fresh.run([fresh.request("second", 1, {"choice": ["a"]})]).values()
    if kills == 1:
        assert (first.text, first.error) == ("a", None)
    else:
        assert "was ended (signal 9); retry the job, or simplify it" in (first.error or "")
    assert (second.text, second.error) == ("a", None)


def test_without_a_process_that_checks_the_worker_ends(
    model: Constrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no row's fault: the jobs are handed back."""
    monkeypatch.setattr("sys.executable", "/nonexistent")
    with Constrained(model.file.path) as helpless, pytest.raises(RunnerError, match="cannot be started"):
        helpless.run([helpless.request("j", 1, {"choice": ["a"]})])


def test_without_files_left_for_that_process_no_row_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("nightmill.worker.grammar.checker.Pipe", full)
    with pytest.raises(RunnerError, match=r"cannot be started: .*Too many open files"):
        Checker(CheckerLimits()).check(Asked(ConstraintKind.REGEX, "a"))


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_keywords_that_clients_refuse_are_those_that_the_parser_refuses(
    keyword: str, model: Constrained
) -> None:
    parsed = LLMatcher(LLTokenizer("byte"), lark_of_schema({keyword: {}}), log_level=0)
    assert f'Unimplemented keys: ["{keyword}"]' in parsed.get_error()
    needed = {"then": "if", "else": "if", "if": "then", "minContains": "contains", "maxContains": "contains"}
    said = {keyword: {"a": {"const": 1}}} | ({needed[keyword]: {}} if keyword in needed else {})
    asked = Asked(ConstraintKind.JSON_SCHEMA, json.dumps(said))
    with pytest.raises(
        ConstraintError, match=re.escape(f"json_schema: cannot be read: the keyword '{keyword}'")
    ):
        model.grammars.compile(asked).result()


@pytest.mark.parametrize(
    "name", ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
def test_formats_that_the_page_names_are_taken(name: str, model: Constrained) -> None:
    assert f"`{name}`" in (Path(__file__).parents[3] / "docs" / "file-formats.md").read_text(encoding="utf-8")
    asked = Asked(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "format": name}))
    model.grammars.compile(asked).result()


def test_an_answer_that_needs_too_much_in_a_step_fails_with_a_remedy(model: Constrained) -> None:
    limits = CheckerLimits(parser=ParserLimits(step_lexer_fuel=2_000, max_items_in_row=50))
    with Constrained(model.file.path, limits) as strict:
        asked = {"grammar": "start: " + " | ".join(f"/{chr(97 + n % 26)}{n}.*/" for n in range(200))}
        done = strict.run([strict.request("wide", 1, asked), *free(strict, 1)])
    assert "is too much for one step" in (done["wide"].error or "") and "simplify it" in (
        done["wide"].error or ""
    )
    assert done["free 0"].error is None


def test_a_dead_end_is_an_error_and_no_answer(model: Constrained) -> None:
    """Where nothing can follow, llguidance would have the text end."""
    done = model.run([model.request("j", 1, {"grammar": 'start: "a" A\nA: /b/ & /c/'})])
    assert (done["j"].stop_reason, done["j"].text) == (StopReason.ERROR, "a")
    assert done["j"].error == f"{STUCK}, behind 'a': grammar leads there, and has no way on; " + (
        "change it so that something can follow"
    )


def test_one_of_twenty_answers_that_comes_to_a_dead_end_costs_no_other(model: Constrained) -> None:
    """Each answer is a request of its own; other rows, of the same grammar as well, go on beside it."""
    asked = {"grammar": 'start: ("a" | "b" | "c" A) "d"\nA: /b/ & /c/'}
    answers = [model.request(f"j.{number}", number, asked) for number in range(20)]
    others = [model.request(f"other {seed}", seed, {"choice": ["x", "y"]}) for seed in range(4)]
    done = model.run([*answers, *others, *free(model, 2)], slots=32)
    failed = {name for name, one in done.items() if one.error}
    assert 0 < len(failed) < 20 and all(name.startswith("j.") for name in failed)
    assert all("behind 'c': grammar leads there" in (done[name].error or "") for name in failed)
    assert {done[one.job_id].text for one in answers if one.job_id not in failed} == {"ad", "bd"}


def test_banned_words_that_are_all_an_answer_may_be_are_named(model: Constrained) -> None:
    asked = model.request("j", 1, {"choice": ["a"]})
    token = model.vocabulary.tokens.index("a")
    done = model.run([replace(asked, banned=((token,),)), *free(model, 1)])
    assert done["j"].stop_reason is StopReason.ERROR
    assert "bad_words of the row rule out all that its answer may have here" in (done["j"].error or "")
    assert done["free 0"].error is None


def test_a_lexer_that_others_have_filled_fails_nobody(
    model: Constrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text then has a small one, and where that is not enough, one as large as that of all."""
    limits = CheckerLimits(parser=ParserLimits(max_lexer_states=150))
    sizes: list[int | None] = []
    compiled = Grammar.compile

    def noted(grammar: Grammar, most_states: int | None = None) -> LLMatcher:
        sizes.append(most_states)
        return compiled(grammar, most_states)

    monkeypatch.setattr(Grammar, "compile", noted)
    monkeypatch.setattr(matcher, "_OWN_STATES", 40)
    with Constrained(model.file.path, limits) as strict:
        asked = {"regex": "((a|b)*a(a|b){11}c){3}"}
        requests = [strict.request(str(seed), seed, asked, max_tokens=40) for seed in range(24)]
        together = strict.run(requests, slots=8)
        assert sizes.count(40) > 8 and sizes.count(None) > strict.grammars.threads
        for request in requests[-3:]:
            with Constrained(model.file.path, limits) as alone:
                (one,) = alone.run([request]).values()
            assert together[request.job_id].token_ids == one.token_ids
    assert [one.error for one in together.values()] == [None] * 24


def test_one_schema_is_compiled_once_however_many_ask_for_it(model: Constrained) -> None:
    """And once for each further core, so that rows of one schema do not wait for each other."""
    before = model.grammars.compiled
    asked = {"json_schema": {"type": "integer", "minimum": 0, "maximum": 9, "title": "only here"}}
    requests = [model.request(str(seed), seed, asked) for seed in range(200)]
    done = model.run(requests)
    assert all(one.text.strip().isdigit() for one in done.values())
    constrained = requests[0].constrained
    assert constrained is not None
    begun = {id(model.grammars.compile(constrained).result()().grammar) for _ in range(9_800)}
    assert len(begun) == model.grammars.threads == 2
    assert model.grammars.compiled == before + 1


def test_few_compiled_grammars_are_kept_and_all_rows_run(
    model: Constrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightmill.worker.grammar.grammars._KEPT", 3)
    requests = [model.request(str(n), n, {"choice": [f"answer {n}"]}, max_tokens=30) for n in range(20)]
    done = model.run(requests, slots=4)
    assert [done[str(n)].text for n in range(20)] == [f"answer {n}" for n in range(20)]
    assert len(model.grammars._known) <= 3


def test_a_slow_schema_delays_neither_free_rows_nor_other_schemas(model: Constrained) -> None:
    slow = CheckerLimits(seconds=2.0)
    with Constrained(model.file.path, slow) as patient:
        requests = [
            patient.request("slow", 1, {"json_schema": {"type": "integer", "multipleOf": 99_999_999}}),
            patient.request("quick", 2, {"choice": ["yes", "no"]}),
            *free(patient, 2),
        ]
        done = patient.run(requests)
    assert list(done)[-1] == "slow" and len(done) == 4


def test_the_process_that_checks_ends_with_the_engine(model: Constrained) -> None:
    with Constrained(model.file.path, CheckerLimits(seconds=1000.0)) as short:
        asked = Asked(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 99_999_999}))
        compiling = short.grammars.compile(asked)
        time.sleep(0.3)
        short.grammars.close()
        assert compiling.exception(120) is not None
