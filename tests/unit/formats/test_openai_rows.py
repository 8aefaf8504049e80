"""Rows of OpenAI's batch format: what becomes a prompt, what is ignored, what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.formats import FileFormat, InputFile
from nightmill.jobs.formats.refusals import REFUSED
from tests.unit.formats.files import chat, completion, only, said, write_lines


def test_a_chat_row_becomes_messages_and_keywords_of_enqueue(tmp_path: Path) -> None:
    row = only(
        tmp_path,
        chat("x", model="demo", max_completion_tokens=9, temperature=0, top_p=0.5, seed=3, stop=["a", "b"]),
    )
    assert row.error is None
    assert (row.number, row.custom_id) == (1, "x")
    assert row.prompt == [{"role": "user", "content": "Say a word"}]
    assert said(row) == {
        "model": "demo", "max_tokens": 9, "temperature": 0, "top_p": 0.5, "seed": 3, "stop": ("a", "b")
    }  # fmt: skip


def test_a_completions_row_becomes_a_plain_prompt(tmp_path: Path) -> None:
    row = only(tmp_path, completion("x", max_tokens=9, stop="."))
    assert (row.error, row.prompt, said(row)) == (None, "Once", {"max_tokens": 9, "stop": (".",)})


@pytest.mark.parametrize("row", [chat, completion])
def test_either_name_of_the_limit_is_taken_and_two_that_differ_are_not(tmp_path: Path, row: Any) -> None:
    assert said(only(tmp_path, row(max_completion_tokens=9))) == {"max_tokens": 9}
    assert said(only(tmp_path, row(max_completion_tokens=9, max_tokens=9))) == {"max_tokens": 9}
    error = only(tmp_path, row(max_completion_tokens=9, max_tokens=8)).error
    assert error is not None
    assert error.message == "body.max_completion_tokens: contradicts max_tokens; give one of them"


def test_our_own_parameters_are_taken_from_the_body(tmp_path: Path) -> None:
    own = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}
    assert said(only(tmp_path, chat(**own))) == own


@pytest.mark.parametrize(
    ("body", "n"),
    [({"n": 3}, 3), ({"n": 3, "best_of": 3}, 3), ({"best_of": 1}, 1), ({"n": None, "best_of": None}, 1)],
)
def test_several_answers_are_taken_and_the_best_of_as_many(
    tmp_path: Path, body: dict[str, Any], n: int
) -> None:
    spec = only(tmp_path, completion(**body)).spec
    assert spec is not None and spec.params.n == n


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_key_that_is_refused_says_why_and_is_taken_where_it_asks_for_nothing(
    tmp_path: Path, name: str
) -> None:
    refusal = REFUSED[name]
    for made in (chat, completion):
        for value in (None, *refusal.neutral):
            row = only(tmp_path, made(**{name: value}))
            assert row.error is None and said(row) == {}
        error = only(tmp_path, made(**{name: {"a": 1}})).error
        assert error is not None and (error.code, error.field) == ("unsupported_field", f"body.{name}")
        assert error.message == f'body.{name}: {{"a": 1}} is not supported: {refusal.why}'


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ({"top_k": -1}, {}), ({"seed": -1}, {}), ({"n": 2, "best_of": 2}, {"n": 2}),
        ({"stream_options": {"continuous_usage_stats": False}}, {}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"parallel_tool_calls": False}, {}), ({"tool_choice": "none", "tools": TOOLS}, {}),
        ({"guided_decoding_backend": "outlines", "cache_prompt": True}, {}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"include_stop_str_in_output": False}, {}),
    ],
)  # fmt: skip
def test_values_that_others_take_are_taken(
    tmp_path: Path, body: dict[str, Any], meant: dict[str, Any]
) -> None:
    row = only(tmp_path, chat(**body))
    assert row.error is None and said(row) == meant


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA, "disable_fallback": True}},
        {"json_schema": SCHEMA},
    ],
)  # fmt: skip
def test_a_schema_is_taken_in_the_words_of_openai_vllm_and_llama_cpp(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    spec = only(tmp_path, chat(**body)).spec
    assert spec is not None and spec.constrained is not None
    assert spec.constrained.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(spec.constrained.text) == SCHEMA | {"additionalProperties": False}


@pytest.mark.parametrize(
    "choice",
    ["look", {"type": "function", "function": {"name": "look"}}, {"type": "function", "name": "look"}],
)
def test_a_function_is_chosen_by_its_name(tmp_path: Path, choice: Any) -> None:
    spec = only(tmp_path, chat(tools=TOOLS, tool_choice=choice)).spec
    assert spec is not None and spec.tools is not None and spec.tools.function == "look"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_who_writes_a_message_may_have_a_name_which_the_template_sees(tmp_path: Path, role: str) -> None:
    messages = [{"role": role, "content": "x", "name": "Jürgen_2"}, {"role": "user", "content": "y"}]
    (first, _) = only(tmp_path, chat(messages=messages)).prompt or []
    assert first == {"role": "system" if role == "developer" else role, "content": "x", "name": "Jürgen_2"}
    for bad in ("", "<|im_end|>", "[INST]", "a b", 5, "a" * 257):
        error = only(tmp_path, chat(messages=[messages[0] | {"name": bad}])).error
        assert error is not None and error.field == "body.messages[0].name"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_no_token_may_be_asked_for_with_an_echo_alone(tmp_path: Path, limit: str) -> None:
    row = only(tmp_path, completion(**{limit: 0}, echo=True, logprobs=1))
    assert row.error is None and said(row) == {"max_tokens": 0, "echo": True, "logprobs": 1}
    error = only(tmp_path, completion(**{limit: 0})).error
    assert (
        error is not None
        and error.message == f"body.{limit}: must be at least 1 (got 0), unless echo is true"
    )


def test_text_parts_are_joined_and_developer_is_system(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": parts}, {"role": "user", "content": "x", "name": None}]
    assert only(tmp_path, chat(messages=messages)).prompt == [
        {"role": "system", "content": "one two"},
        {"role": "user", "content": "x"},
    ]


@pytest.mark.parametrize(
    ("row", "meant"),
    [
        (chat(logprobs=True), {"logprobs": 0}), (chat(logprobs=True, top_logprobs=20), {"logprobs": 20}),
        (completion(logprobs=5), {"logprobs": 5}), (completion(logprobs=0), {"logprobs": 0}),
        (completion(logprobs=False), {}), (completion(echo=True, logprobs=1), {"logprobs": 1, "echo": True}),
        (chat(logprobs=3), "logprobs: must be true or false, not a number; give top_logprobs, too"),
        (chat(top_logprobs=2), "top_logprobs: needs logprobs: true"),
        (
            chat(logprobs=True, top_logprobs=21),
            "top_logprobs: must be a whole number from 0 to 20 (got 21)",
        ),
        (
            completion(logprobs=True),
            "logprobs: must be a whole number: how many of the likeliest tokens are wanted",
        ),
        (completion(top_logprobs=2), "top_logprobs: is for chats; give logprobs, which is a number here"),
        (
            chat(echo=True),
            "echo: is for plain prompts: a chat is no text to begin an answer with; remove it",
        ),
    ],
)  # fmt: skip
def test_log_probabilities_are_asked_for_in_the_words_of_each_endpoint(
    tmp_path: Path, row: dict[str, Any], meant: dict[str, Any] | str
) -> None:
    read = only(tmp_path, row)
    assert (read.error.message.removeprefix("body.") if read.error else said(read)) == meant


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"}, {"stream": False},
        {"n": 1}, {"n": None}, {"response_format": {"type": "text"}}, {"tools": []}, {"tools": None},
        {"tool_choice": "none"}, {"tool_choice": "auto"}, {"logprobs": False}, {"logprobs": None},
        {"top_logprobs": 0}, {"logit_bias": {}}, {"presence_penalty": 0.0}, {"frequency_penalty": 0},
        {"temperature": None}, {"stop": None}, {"modalities": ["text"]}, {"parallel_tool_calls": True},
        {"max_tokens": 5, "max_completion_tokens": None},
    ],
)  # fmt: skip
def test_keys_without_effect_are_accepted_and_leave_no_setting(tmp_path: Path, body: dict[str, Any]) -> None:
    row = only(tmp_path, chat(**body))
    assert row.error is None
    assert said(row) == ({"max_tokens": 5} if "max_tokens" in body else {})


def test_a_prompt_may_be_token_ids(tmp_path: Path) -> None:
    row = only(tmp_path, completion(prompt=[5, 0, 2**31 - 1]))
    assert (row.error, row.prompt) == (None, [5, 0, 2**31 - 1])


@pytest.mark.parametrize("prompt", ["Once", [1, 2]])
def test_a_list_of_one_prompt_is_that_prompt(tmp_path: Path, prompt: Any) -> None:
    row = only(tmp_path, completion(prompt=[prompt]))
    assert (row.error, row.prompt) == (None, prompt)


def test_the_format_is_found_from_the_first_whole_row(tmp_path: Path) -> None:
    openai_rows = write_lines(tmp_path / "a.jsonl", [b"not json", chat()])
    plain = write_lines(tmp_path / "b.jsonl", [b"not json", {"prompt": "x"}])
    assert InputFile(openai_rows).format is FileFormat.OPENAI
    assert InputFile(plain).format is FileFormat.JSONL


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "null"}},
                }
            },
            "json_schema",
            '{"type":"null"}',
        ),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type":"null"}'),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type":"null"}'),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json": {"type": "null"}, "regex": None}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
    ],
)
def test_what_the_answer_must_be_in_the_words_of_openai_and_vllm(
    tmp_path: Path, body: dict[str, Any], kind: str, text: str
) -> None:
    for row in (chat(**body), completion(**body)):
        assert said(only(tmp_path, row)) == {"constrained": Constrained(ConstraintKind(kind), text)}
