"""Rows of OpenAI's batch format that are refused: by the name of the key, with the value and the remedy."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.formats.files import chat, completion, only


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


@pytest.mark.parametrize(
    "body", [{"n": 3, "best_of": 2}, {"best_of": 0}, {"best_of": True}, {"best_of": "2"}, {"best_of": [1]}]
)
def test_best_of_what_cannot_be_is_an_invalid_value(tmp_path: Path, body: dict[str, Any]) -> None:
    error = only(tmp_path, completion(**body)).error
    assert error is not None
    assert (error.code, error.field) == ("invalid_value", "body.best_of")
    assert "must be a whole number of at least n, which is" in error.message


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
