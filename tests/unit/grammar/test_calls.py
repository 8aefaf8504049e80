"""A call that must be made is one that can be read, of a function that there is, with arguments that obey."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from nightmill.jobs.base.contract import CallFormat, Constrained, ConstraintKind, Markup, StopReason, Tools
from nightmill.jobs.reply.parsing import read_reply
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.structured import constrained_by
from nightmill.worker.engine.request import Request
from nightmill.worker.grammar.calls import calls_asked
from nightmill.worker.grammar.source import complete, lark_of
from nightmill.worker.grammar.thoughts import FINAL
from nightmill.worker.grammar.written_calls import WRITTEN as TYPED_FORMATS
from tests.support import constrained
from tests.support.ggufs import CHATML, byte_vocabulary, write_model
from tests.support.walking import BYTES, walk

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Bonn", 'a "b" <tool_call>']},
        "days": {"type": "integer", "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": WEATHER,
    "news": {
        "type": "object", "properties": {"of": {"type": "boolean"}}, "required": ["of"],
        "additionalProperties": False,
    },
    "no.args-1": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ANY = Tools(FUNCTIONS, required=True)
ONE = Tools(FUNCTIONS, required=True, parallel=False)
NEWS = Tools(FUNCTIONS, required=True, function="news")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = byte_vocabulary(extra=[("[TOOL_CALLS]", 3), ("[ARGS]", 3), ("</tool_call>", 4)])
    template = "{{ '<tool_call></tool_call>[TOOL_CALLS][ARGS]' }}" + CHATML
    path = tmp_path_factory.mktemp("calls") / "m.gguf"
    return write_model(path, vocabulary=vocabulary, chat_template=template, context_length=1024)


def request(name: str, seed: int, asked: Constrained) -> Request:
    return Request(name, 1, (seed % 200, 7), GenerationParams(max_tokens=400), seed, constrained=asked)


def test_every_finished_answer_is_calls_that_obey(model_path: Path) -> None:
    asked = {
        f"{written} {seed}": (written, tools, seed)
        for written in CallFormat
        for seed, tools in enumerate((ANY, ONE, NEWS))
    }
    with constrained.Constrained(model_path) as model:
        requests = [
            request(name, seed, calls_asked(tools, written)) for name, (written, tools, seed) in asked.items()
        ]
        done = model.run(requests, slots=len(requests))
        marks = model.vocabulary.marks
    finished, with_marks = set(), 0
    for name, (written, tools, _) in asked.items():
        one = done[name]
        assert one.error is None
        if one.stop_reason is not StopReason.EOS:
            continue
        finished.add(written)
        with_marks += not marks.isdisjoint(one.token_ids)
        reply = read_reply(one.text, Markup(written), tools, name)
        assert reply.content == "" and reply.tool_calls
        assert tools is ANY or len(reply.tool_calls) == 1
        assert tools is not NEWS or reply.tool_calls[0].name == "news"
        for call in reply.tool_calls:
            Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
    assert finished == set(CallFormat)
    assert with_marks  # not only spelt out


STRICT = Tools(
    [
        {"type": "function", "function": {"name": "news", "parameters": SCHEMAS["news"], "strict": True}},
        FUNCTIONS[0],
    ]
)
# How a call begins, and ends, with NAME and its arguments between.
WRITTEN = {
    CallFormat.HERMES: ('I see.\n<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    CallFormat.LLAMA: ('{"name": "NAME", "parameters": ', "}"),
    CallFormat.MISTRAL: ('I see.[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
    CallFormat.MISTRAL_NAMED: ("I see.[TOOL_CALLS]NAME[ARGS]", ""),
    CallFormat.JSON: ('{"name": "NAME", "arguments": ', "}"),
    CallFormat.GRANITE: ('I see.<|tool_call|>[{"name": "NAME", "arguments": ', "}]"),
    CallFormat.GIGACHAT: ('I see.<|function_call|>{"name": "NAME", "arguments": ', "}"),
    CallFormat.PHI: ('I see.<|tool_call|>[{"name": "NAME", "arguments": ', "}]<|/tool_call|>"),
    CallFormat.NEMOTRON: ('I see.<TOOLCALL>[{"name": "NAME", "arguments": ', "}]</TOOLCALL>"),
    CallFormat.TOOL_CALLS: ('I see.<tool_calls>[{"name": "NAME", "arguments": ', "}]</tool_calls>"),
    CallFormat.HARMONY: ("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""),
    CallFormat.DEEPSEEK: (
        "I see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    CallFormat.DEEPSEEK_R1: (
        "I see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    CallFormat.KIMI: (
        "I see.<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:12<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    CallFormat.COHERE: (
        'I see.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
        "}\n]<|END_ACTION|>",
    ),
}
IN_JSON = sorted(WRITTEN, key=str)


@pytest.mark.parametrize("written", IN_JSON)
def test_where_functions_are_strict_text_is_free_and_calls_obey(written: CallFormat) -> None:
    grammar = complete(lark_of(calls_asked(STRICT, written)))
    begin, end = WRITTEN[written]
    answer = FINAL if written is CallFormat.HARMONY else ""

    def obeys(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        whole = matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        return whole and matcher.is_accepting()

    def call(name: str, arguments: str) -> str:
        return begin.replace("NAME", name) + arguments + end

    for text in ("", "It rains.", "1 < 2 [TOOL", "<think>\nhm\n</think>\n\n<b>", "é\n" * 500):
        assert obeys(answer + text)
    assert obeys(call("news", '{"of": true}'))
    assert obeys(call("weather", '{"place": 7}'))  # which is not strict
    assert not obeys(call("news", '{"of": 1}'))
    assert not obeys(call("news", "{}"))
    assert not obeys(call("gossip", '{"of": true}'))


@pytest.mark.parametrize("written", IN_JSON)
@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json_schema": SCHEMAS["news"]}, '{"of":false}', '{"of":1}'),
        ({"regex": "[A-Z]{2}"}, "AB", "ABC"),
        ({"choice": ["yes", "no {}"]}, "no {}", "maybe"),
    ],
    ids=["schema", "regex", "choice"],
)
def test_an_answer_is_calls_or_has_the_form(
    written: CallFormat, form: dict[str, Any], good: str, bad: str
) -> None:
    may = Tools(STRICT.functions)
    grammar = complete(lark_of(calls_asked(may, written, constrained_by(form))))
    before, after = WRITTEN[written]
    before = before.removeprefix("I see.").lstrip()

    def whole(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        taken = matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        return taken and matcher.is_accepting()

    call = before.replace("NAME", "news") + '{"of": true}' + after
    answer = FINAL if written is CallFormat.HARMONY else ""
    assert whole(answer + good) and whole(call)
    assert not whole(answer + bad) and not whole("") and not whole("I see." + call)
    assert not whole(before.replace("NAME", "news") + '{"of": 1}' + after)  # of a strict function
    assert whole(before.replace("NAME", "weather") + '{"place": 7}' + after)  # of one that is not


def test_what_is_no_tools_fails_alone(model_path: Path) -> None:
    refused = {"type": "object", "properties": {"a": {"not": {}}}}
    texts = [
        "", "[]", '{"written": "smoke"}', '{"written": "hermes", "several": true, "functions": [["f"]]}',
        json.dumps({"written": "json", "free": False, "several": False, "functions": [["f", refused]]}),
    ]  # fmt: skip
    with constrained.Constrained(model_path) as model:
        strange = [
            request(str(n), n, Constrained(ConstraintKind.CALLS, text)) for n, text in enumerate(texts)
        ]
        done = model.run([*strange, request("good", 1, calls_asked(NEWS, CallFormat.HERMES))])
    assert done.pop("good").error is None
    assert [name for name, one in done.items() if not (one.error or "").startswith("tools: ")] == []


TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a b", "c"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "deep": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
    },
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": ["boolean", "null"]}},
}
BY_ARGUMENT = sorted(TYPED_FORMATS, key=str)


@pytest.mark.parametrize("written", BY_ARGUMENT)
def test_calls_whose_arguments_have_marks_of_their_own_obey_their_schemas(written: CallFormat) -> None:
    functions = [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]
    tools = Tools(functions, required=True, parallel=False)
    grammar = complete(lark_of(calls_asked(tools, written)))
    seen: set[str] = set()
    for seed in range(40):
        text = walk(LLMatcher(BYTES, grammar, log_level=0), random.Random(seed), 400)
        if text is None:
            continue
        reply = read_reply(text.decode(errors="replace"), Markup(written), tools, "j")
        assert reply.tool_calls and reply.content == "", text
        for call in reply.tool_calls:
            Draft202012Validator(TYPED).validate(call.parsed)
            seen |= call.parsed.keys()
    assert seen >= {"kind", "deep"}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (
            CallFormat.QWEN_XML,
            '<tool_call>\n<function=f>\n<parameter=note>\na "b" <c>\n</parameter>\n<parameter=n>\n7\n'
            "</parameter>\n</function>\n</tool_call>",
        ),
        (
            CallFormat.GLM_XML,
            '<tool_call>f\n<arg_key>note</arg_key>\n<arg_value>a "b" <c></arg_value>\n<arg_key>n</arg_key>\n'
            "<arg_value>7</arg_value>\n</tool_call>",
        ),
        (CallFormat.GEMMA, '<|tool_call>call:f{note:<|"|>a "b" <c><|"|>,n:7}<tool_call|>'),
        (
            CallFormat.SEED,
            '<seed:tool_call>\n<function=f>\n<parameter=note>a "b" <c></parameter>\n'
            "<parameter=n>7</parameter>\n</function>\n</seed:tool_call>",
        ),
        (
            CallFormat.MINIMAX,
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="note">a "b" <c></parameter>\n'
            '<parameter name="n">7</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
    ],
)
def test_a_text_stands_bare_between_its_marks(written: CallFormat, text: str) -> None:
    parameters = {
        "type": "object", "properties": {"note": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["note", "n"],
    }  # fmt: skip
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], required=True)
    grammar = complete(lark_of(calls_asked(tools, written)))

    def obeys(said: str) -> bool:
        matcher = LLMatcher(BYTES, grammar, log_level=0)
        return (
            matcher.try_consume_tokens(list(said.encode())) == len(said.encode()) and matcher.is_accepting()
        )

    assert obeys(text) and not obeys(text.replace("7", "x")) and not obeys(text[:-1])
    (call,) = read_reply(text, Markup(written), tools, "j").tool_calls
    assert call.parsed == {"note": 'a "b" <c>', "n": 7}
