"""What may be said of how a chat becomes a prompt."""

from typing import Any

import pytest

from nightmill.jobs.base.contract import AS_USUAL, Rendering
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.request.spec import JobSpec

USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "Well"}


def rendering(*messages: dict[str, str], **said: Any) -> Rendering | None:
    return JobSpec.parse({"messages": list(messages), **said}).rendering


def test_a_chat_is_rendered_as_usual_unless_it_says_otherwise() -> None:
    assert rendering(USER) is None
    assert rendering(USER, chat_template_kwargs={}, add_generation_prompt=True) is None
    assert rendering(USER, add_generation_prompt=False) == Rendering(add_generation_prompt=False)
    thinking = {"enable_thinking": False, "reasoning_effort": "low", "budget": 7}
    assert rendering(USER, chat_template_kwargs=thinking) == Rendering(thinking)
    assert rendering(USER, BEGUN, continue_final_message=True) == Rendering({}, False, True)


def test_an_effort_is_variables_of_the_template_and_none_is_a_budget_of_nothing() -> None:
    def parsed(**said: Any) -> tuple[dict[str, Any], int | None]:
        spec = JobSpec.parse({"messages": [USER], **said}, JobSpec.defaults(of_batch))
        return dict((spec.rendering or AS_USUAL).variables), spec.params.max_reasoning_tokens

    of_batch: dict[str, Any] = {}
    off, on = ({"enable_thinking": thinks, "thinking": thinks} for thinks in (False, True))
    assert parsed(reasoning_effort="none") == (off, 0)
    assert parsed(reasoning_effort="none", max_reasoning_tokens=9) == (off, 9)
    assert parsed(reasoning_effort="minimal") == (on | {"reasoning_effort": "low"}, None)
    assert parsed(reasoning_effort="high", chat_template_kwargs={"thinking": 7}) == (
        on | {"reasoning_effort": "high", "thinking": 7}, None
    )  # fmt: skip
    of_batch = {"reasoning_effort": "none"}
    assert parsed() == (off, 0)
    assert parsed(reasoning_effort="medium") == (on | {"reasoning_effort": "medium"}, None)
    for said, message in (
        ({"reasoning_effort": "lots"}, "reasoning_effort: must be one of none, minimal, low"),
        ({"max_reasoning_tokens": 256}, "max_reasoning_tokens: must be less than max_tokens, which is 256"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens: "),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            parsed(**said)


def test_what_is_said_of_chats_says_nothing_of_other_prompts() -> None:
    of_batch = JobSpec.defaults({"chat_template_kwargs": {"a": 1}, "continue_final_message": True})
    for prompt in ("a text", [1, 2]):
        assert JobSpec.parse(prompt, of_batch).rendering is None
        assert JobSpec.parse({"prompt": prompt}, of_batch).rendering is None


@pytest.mark.parametrize(
    ("messages", "said", "message"),
    [
        (
            [USER],
            {},
            "continue_final_message: the last message must be the assistant's, not the user's: add one "
            "with what the answer begins with",
        ),
        (
            [USER, BEGUN],
            {"add_generation_prompt": True},
            "add_generation_prompt: contradicts continue_final_message, which opens no other message; give "
            "one of them",
        ),
    ],
)
def test_a_continuation_without_a_beginning_is_refused(
    messages: list[Any], said: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        rendering(*messages, continue_final_message=True, **said)
    assert str(caught.value) == message
    of_batch = JobSpec.defaults({"continue_final_message": True, **said})
    with pytest.raises(InvalidParameterError):
        JobSpec.parse(messages, of_batch)


@pytest.mark.parametrize(
    "name",
    [
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "tokenize", "conversation", "bos_token", "eos_token", "pad_token", "raise_exception", "self",
        "strftime_now",
    ],
)  # fmt: skip
def test_what_a_template_has_from_elsewhere_cannot_be_given(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"chat_template_kwargs: {name} is the template's own"):
        rendering(USER, chat_template_kwargs={name: True})


@pytest.mark.parametrize(
    "given",
    [
        {"a": None}, {"a": [1]}, {"a": {"b": 1}}, {"a": "x" * 257}, {"a": "<|im_end|>"}, {"a": "[INST]"},
        {"a": "{{ 1 }}"}, {"a": "line\nline"}, {"a": "\u00fc"}, {"a": float("nan")}, {"a": float("inf")},
        {"": 1}, {"1a": 1}, {"a b": 1}, {"_a": 1}, {"a" * 65: 1}, {7: 1}, {f"n{n}": 1 for n in range(17)},
        [], "a", 5, True,
    ],
)  # fmt: skip
def test_variables_are_few_short_and_plain(given: Any) -> None:
    with pytest.raises(InvalidParameterError, match="chat_template_kwargs: "):
        rendering(USER, chat_template_kwargs=given)


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
@pytest.mark.parametrize("value", [1, 0, "true", []])
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name}: must be true or false"):
        rendering(USER, BEGUN, **{name: value})


def test_a_row_reads_back_as_it_was_said() -> None:
    for said in (AS_USUAL, Rendering({"a": 1, "b": "x"}, False, True)):
        assert Rendering.read(said.values()) == said


@pytest.mark.parametrize(
    "stored",
    [
        None, [], {}, {"variables": {}}, AS_USUAL.values() | {"more": 1},
        AS_USUAL.values() | {"variables": []},
        AS_USUAL.values() | {"continue_final_message": 1},
    ],
)  # fmt: skip
def test_what_this_version_cannot_read_is_nothing(stored: Any) -> None:
    assert Rendering.read(stored) is None


def test_a_key_stands_for_its_rendering() -> None:
    def mark(**said: Any) -> str:
        job = JobSpec.parse({"messages": [USER], "idempotency_key": "k", "seed": 1, **said})
        return str(job._fingerprint())

    assert mark() == mark(chat_template_kwargs={}) != mark(chat_template_kwargs={"a": 1})
