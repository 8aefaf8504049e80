"""Rows of OpenAI's batch format: what becomes a prompt, what is ignored, what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.formats import FileFormat, InputFile, InputRow
from nightmill.jobs.formats.refusals import REFUSED
from tests.unit.formats.files import chat, completion, read_rows, said, write_lines


def only(tmp_path: Path, row: Any) -> InputRow:
    (read,) = read_rows(write_lines(tmp_path / "in.jsonl", [row]), FileFormat.OPENAI)
    return read


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


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"suffix": "the end"}, 'body.suffix: "the end" is not supported: models here continue a prompt'),
        (
            {"best_of": 3},
            "body.best_of: 3 is more than n, which is 1: answers are not chosen here; give n: 3 with",
        ),
    ],
)
def test_what_models_here_cannot_do_is_refused_with_the_reason(
    tmp_path: Path, body: dict[str, Any], reason: str
) -> None:
    error = only(tmp_path, completion(**body)).error
    assert error is not None and error.message.startswith(reason)


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


@pytest.mark.parametrize(
    "body", [{"n": 3, "best_of": 2}, {"best_of": 0}, {"best_of": True}, {"best_of": "2"}, {"best_of": [1]}]
)
def test_best_of_what_cannot_be_is_an_invalid_value(tmp_path: Path, body: dict[str, Any]) -> None:
    error = only(tmp_path, completion(**body)).error
    assert error is not None
    assert (error.code, error.field) == ("invalid_value", "body.best_of")
    assert "must be a whole number of at least n, which is" in error.message


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


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 2, "best_of": 3}, "best_of"), ({"stream": True}, "stream"), ({"stream": 0}, "stream"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"functions": [{}]}, "functions"), ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"best_of": 3}, "best_of"), ({"temprature": 1}, "temprature"), ({"prompt": "x"}, "prompt"),
    ],
)  # fmt: skip
def test_keys_that_would_change_the_answer_are_refused_by_name(
    tmp_path: Path, body: dict[str, Any], field: str
) -> None:
    error = only(tmp_path, chat(**body)).error
    assert error is not None
    assert (error.code, error.field) == ("unsupported_field", f"body.{field}")
    assert error.message.startswith(f"body.{field}: ")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"response_format": {"type": "poem"}},
            "body.response_format.type: must be one of text, json_object, json_schema (got 'poem')",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "body.response_format.json_schema.schema: must be an object, not null",
        ),
        (
            {"tools": [{"type": "function"}]},
            "body.tools[0].function: must be an object with a name, not null",
        ),
        (
            {"functions": [{}]},
            "body.functions: this list is not supported: it is OpenAI's older word for tools",
        ),
        (
            {"audio": {"voice": "x"}},
            'body.audio: {"voice": "x"} is not supported: models here read and write',
        ),
        (
            {"stream": True},
            "body.stream: true is not supported: results are written as they finish; remove it",
        ),
        (
            {"top_n_words": 1},
            "body.top_n_words: is not supported: remove it; docs/file-formats.md lists what",
        ),
        ({"guided_jsn": {}}, "body.guided_jsn: is not supported: did you mean guided_json?"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "body.structured_outputs.structural_tag: is not supported: remove it; known are json, regex, ",
        ),
    ],
)
def test_a_refusal_shows_the_value_and_says_what_to_do(
    tmp_path: Path, body: dict[str, Any], said: str
) -> None:
    error = only(tmp_path, chat(**body)).error
    assert error is not None and error.message.startswith(said)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"top_p": 0}, "top_p"),
        ({"seed": -2}, "seed"), ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"), ({"stop": [""]}, "stop"), ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"), ({"model": "no such name"}, "model"), ({"model": 5}, "model"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"messages": []}, "messages"), ({"messages": "hello"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(tmp_path: Path, body: dict[str, Any], field: str) -> None:
    error = only(tmp_path, chat(**body)).error
    assert error is not None
    assert (error.code, error.field) == ("invalid_value", f"body.{field}")
    assert error.message.startswith(f"body.{field}: ")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "nick": "Ann"}], "messages[0].nick"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
    ],
)
def test_contents_other_than_text_are_refused_by_name(
    tmp_path: Path, messages: list[Any], field: str
) -> None:
    error = only(tmp_path, chat(messages=messages)).error
    assert error is not None
    assert (error.code, error.field) == ("unsupported_field", f"body.{field}")


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_each_key_of_a_row_is_required(tmp_path: Path, name: str) -> None:
    row = chat()
    del row[name]
    error = only(tmp_path, row).error
    assert error is not None
    assert (error.code, error.field) == ("missing_field", name)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (chat(messages=None), "body.messages"),
        (completion(prompt=None), "body.prompt"),
        (chat(messages=[{"content": "x"}]), "body.messages[0].role"),
        (chat(messages=[{"role": "assistant", "content": None}]), "body.messages[0].content"),
    ],
)
def test_a_row_without_a_prompt_is_refused(tmp_path: Path, row: Any, field: str) -> None:
    error = only(tmp_path, row).error
    assert error is not None
    assert (error.code, error.field) == ("missing_field", field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"method": "GET"}, "method"), ({"url": "/v1/moderations"}, "url"), ({"url": ["x"]}, "url"),
        ({"body": "x"}, "body"), ({"custom_id": 5}, "custom_id"), ({"custom_id": ""}, "custom_id"),
        ({"custom_id": "x" * 513}, "custom_id"), ({"custom_id": "\ud800"}, "custom_id"),
    ],
)  # fmt: skip
def test_the_frame_of_a_row_is_checked(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    error = only(tmp_path, chat() | change).error
    assert error is not None
    assert (error.code, error.field) == ("invalid_value", field)


def test_a_bad_row_keeps_its_custom_id_unless_that_is_bad_itself(tmp_path: Path) -> None:
    assert only(tmp_path, chat("x", best_of=2)).custom_id == "x"
    assert only(tmp_path, chat("\ud800", best_of=2)).custom_id is None


def test_a_prompt_may_be_token_ids(tmp_path: Path) -> None:
    row = only(tmp_path, completion(prompt=[5, 0, 2**31 - 1]))
    assert (row.error, row.prompt) == (None, [5, 0, 2**31 - 1])


@pytest.mark.parametrize("prompt", ["Once", [1, 2]])
def test_a_list_of_one_prompt_is_that_prompt(tmp_path: Path, prompt: Any) -> None:
    row = only(tmp_path, completion(prompt=[prompt]))
    assert (row.error, row.prompt) == (None, prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", "b"], "has 2 prompts, and a row is one; give each a row and a custom_id of its own"),
        ([[1], [2], [3]], "has 3 prompts, and a row is one; give each a row and a custom_id of its own"),
        ([], "is empty"),
        (
            [True],
            "must be a text, a list of token ids, or a list of these, "
            "not a list that begins with true or false",
        ),
        (5, "must be a text, a list of token ids, or a list of these, not a number"),
    ],
)
def test_what_is_said_of_other_prompts(tmp_path: Path, prompt: Any, message: str) -> None:
    error = only(tmp_path, completion(prompt=prompt)).error
    assert error is not None and error.message == f"body.prompt: {message}"


@pytest.mark.parametrize("bad", [-1, 2**31, 1.5, True, "a", None, [1]])
def test_a_list_with_something_else_than_token_ids_is_refused_by_its_place(tmp_path: Path, bad: Any) -> None:
    error = only(tmp_path, completion(prompt=[1, bad])).error
    assert error is not None
    assert (error.code, error.field) == ("invalid_value", "body.prompt[1]")


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]], [], {"a": 1}, 5, True])
def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path, prompt: Any) -> None:
    error = only(tmp_path, completion(prompt=prompt)).error
    assert error is not None
    assert (error.code, error.field) == ("invalid_value", "body.prompt")


def test_an_error_is_one_printable_line_of_bounded_length(tmp_path: Path) -> None:
    for value in ("x\ny\x1b[31m\0\ud800", "y" * 10**6, {"\n": 1}):
        error = only(tmp_path, chat(temperature=value)).error
        assert error is not None
        assert error.message.isprintable()
        assert len(error.message) < 350
        error.message.encode("utf-8")


def test_a_key_named_in_an_error_is_printable_too(tmp_path: Path) -> None:
    error = only(tmp_path, chat(**{"a\nb\ud800": 1})).error
    assert error is not None
    assert error.field == "body.a\\nb\\ud800"


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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"guided_json": "{"}, "is not JSON"),
        ({"guided_json": [1]}, "body.json_schema: must be an object, not a list"),
        ({"structured_outputs": ["a"]}, "body.structured_outputs: must be an object, not a list"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "contradicts"),
        (
            {"guided_json": {}, "structured_outputs": {"json": {"type": "null"}}},
            "body.structured_outputs.json: contradicts guided_json; give one of them",
        ),
        ({"regex": "a", "guided_regex": "b"}, "body.guided_regex: contradicts regex; give one of them"),
        ({"guided_whitespace_pattern": " *"}, 'body.guided_whitespace_pattern: " *" is not supported: white'),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
            "body.response_format.schema: contradicts json_schema; give one of them",
        ),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "body.response_format.schema: is not supported",
        ),
        (
            {"response_format": {"type": "json_object", "schema": [1]}},
            "body.response_format.schema: must be an object, not a list",
        ),
    ],
)
def test_what_the_answer_must_be_and_cannot_is_refused(
    tmp_path: Path, body: dict[str, Any], message: str
) -> None:
    error = only(tmp_path, chat(**body)).error
    assert error is not None and message in error.message
