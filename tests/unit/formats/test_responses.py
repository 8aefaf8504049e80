"""Items of /v1/responses and messages of chats: the one becomes the other and back, and nothing is lost."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.openai import endpoint_of, openai_job
from nightmill.jobs.formats.responses.conversation import continued
from nightmill.jobs.formats.responses.items import message_items, read_input
from nightmill.jobs.formats.responses.request import IGNORED, NEUTRAL, RESPONSES, read_response
from nightmill.jobs.request.prompts import check_messages
from nightmill.jobs.request.spec import JobSpec

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,9}", fullmatch=True)
CALLS = st.builds(
    lambda call_id, name: {
        "id": call_id, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'},
    },
    NAMES,
    NAMES,
)  # fmt: skip
TURNS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system"]), TEXTS),
    st.builds(lambda call_id, text: {"role": "tool", "tool_call_id": call_id, "content": text}, NAMES, TEXTS),
    st.builds(
        lambda text, thoughts, calls: (
            {"role": "assistant", "content": text}
            | ({"reasoning_content": thoughts} if thoughts else {})
            | ({"tool_calls": calls} if calls else {})
        ),
        TEXTS,
        st.one_of(st.none(), TEXTS),
        st.lists(CALLS, max_size=3),
    ),
)


def read(body: dict[str, Any]) -> JobSpec:
    return read_response(body, JobSpec()).spec


@given(st.lists(TURNS, min_size=1, max_size=6))
def test_messages_become_items_and_the_same_messages_again(messages: list[JsonObject]) -> None:
    checked = check_messages(messages)
    items = list(message_items(checked, "0" * 32))
    assert len({item["id"] for item in items}) == len(items)
    assert check_messages([one.message for one in read_input(items)]) == checked


def test_thoughts_and_calls_belong_to_the_turn_around_them() -> None:
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "one "}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "two"}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "wet"}]},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "It rains."},
        {"role": "assistant", "content": "Take care."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "three"}]},
    ]
    messages = [one.message for one in read_input(items)]
    assert [(one["role"], one["content"], one.get("reasoning_content")) for one in messages] == [
        ("assistant", "", "one two"),
        ("tool", "wet", None),
        ("assistant", "It rains.", None),
        ("assistant", "Take care.", None),
        ("assistant", "", "three"),
    ]
    assert messages[0]["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_concerns_a_service_has_no_effect(name: str) -> None:
    assert read({"input": "Hello", name: "x"}).messages == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_values_without_an_effect_are_taken_and_others_are_not(name: str) -> None:
    for value in (*NEUTRAL[name], None):
        assert read({"input": "Hello", name: value}).params == JobSpec().params
    with pytest.raises(InvalidRequestError) as error:
        read({"input": "Hello", name: "anything"})
    assert error.value.field == name


def test_a_row_says_which_endpoint_it_is_for() -> None:
    row = {"custom_id": "a", "method": "POST", "url": RESPONSES, "body": {"input": "Hello"}}
    spec = openai_job(row, JobSpec())
    assert (endpoint_of(spec), spec.custom_id) == (RESPONSES, "a")
    assert spec.request is not None and spec.request["store"] is False
    for body, field in (
        ({"input": []}, "body.input"),
        ({"background": True, "input": "x"}, "body.background"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            openai_job(row | {"body": body}, JobSpec())
        assert error.value.field == field


def test_a_conversation_has_a_bound() -> None:
    said = [{"role": "user", "content": "x" * (1 << 20)}]
    assert len(continued(said * 15, said, instructions=False)) == 16
    with pytest.raises(InvalidRequestError, match="begin a new conversation") as error:
        continued(said * 16, said, instructions=False)
    assert error.value.field == "previous_response_id"
    with pytest.raises(InvalidRequestError, match="begin a new conversation"):
        continued([{"role": "user", "content": ""}] * 100_000, said, instructions=False)
