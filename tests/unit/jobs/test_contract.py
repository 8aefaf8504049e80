"""The words of the contract, and what may be said about a job: bad values fail with their field's name."""

import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightmill.jobs.base.contract import FINAL_STATES, JobState, StopReason, unstorable
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError, InvalidRequestError
from nightmill.jobs.request.parameters import MAX_SEED, GenerationParams
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.request.stored_parameters import from_stored, stored

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NUL, SURROGATE = "a\x00b", "ab\ud800"
NUL_SAID = "contains a NUL character at position 1, which SQL text cannot hold"
SURROGATE_SAID = "contains a lone surrogate (U+D800) at position 2: it is not valid Unicode"


def test_three_states_are_final_and_every_stop_reason_leads_to_one() -> None:
    assert {"succeeded", "failed", "cancelled"} == FINAL_STATES
    assert [state.final for state in JobState] == [False, False, True, True, True]
    assert {str(reason): str(reason.state) for reason in StopReason} == {
        "eos": "succeeded",
        "stop_sequence": "succeeded",
        "length": "succeeded",
        "context_full": "succeeded",
        "cancelled": "cancelled",
        "deadline": "failed",
        "budget": "failed",
        "error": "failed",
    }


def test_the_defaults_of_generation_are_those_of_the_contract() -> None:
    assert GenerationParams().model_dump() == {
        "max_tokens": 256,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
        "ignore_eos": False,
        "stop_token_ids": (),
        "min_tokens": 0,
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "bad_words": (),
        "logprobs": None,
        "echo": False,
        "score": (),
        "include_stop_str_in_output": False,
        "prompt_logprobs": None,
        "return_token_ids": False,
        "truncate_prompt_tokens": None,
        "max_reasoning_tokens": None,
        "embed": False,
        "dimensions": None,
        "pooling": None,
        "rerank": None,
        "instruction": None,
    }


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"logit_bias": {"5": 1, 5: 2}}, "logit_bias", "names a token twice"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "must be a"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias", "must be at most 100"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "must have at most 1024"),
        ({"presence_penalty": 2.1}, "presence_penalty", "must be at most 2 (got 2.1)"),
        ({"bad_words": ["a", " "]}, "bad_words", "a bad word must have more than spaces"),
        ({"bad_words": ["a" * 300]}, "bad_words", "a bad word must have at most 256 characters (got 300)"),
        ({"min_tokens": 300}, "min_tokens", "must not be more than max_tokens, which is 256 (got 300)"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "must not be more than max_tokens, which is 2"),
        ({"min_tokens": 3, "max_tokens": 0}, "max_tokens", "must be at least 1 (got 0)"),
        ({"min_tokens": -1}, "min_tokens", "must be at least 0 (got -1)"),
        ({"stop_token_ids": "a"}, "stop_token_ids", "must be a list (got 'a')"),
        ({"stop_token_ids": True}, "stop_token_ids", "must be a list (got True)"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids", "must be a whole number (got 'a')"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "must be a whole number (got True)"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "must be at least 0 (got -1)"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids", "must have at most 256 entries"),
        ({"max_tokens": -1}, "max_tokens", "must be at least 1 (got -1)"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1 (got 0)"),
        ({"max_tokens": 1_000_001}, "max_tokens", "must be at most 1000000"),
        ({"max_tokens": True}, "max_tokens", "must be a whole number (got True)"),
        ({"max_tokens": 1.5}, "max_tokens", "must be a whole number"),
        ({"max_tokens": "12"}, "max_tokens", "must be a whole number (got '12')"),
        ({"temperature": math.nan}, "temperature", "must be a finite number (got nan)"),
        ({"temperature": math.inf}, "temperature", "must be a finite number (got inf)"),
        ({"temperature": -0.1}, "temperature", "must be at least 0 (got -0.1)"),
        ({"temperature": True}, "temperature", "must be a number (got True)"),
        ({"temperature": "hot"}, "temperature", "must be a number (got 'hot')"),
        ({"top_k": -2}, "top_k", "must be at least 0"),
        ({"top_k": False}, "top_k", "must be a whole number"),
        ({"top_p": 0.0}, "top_p", "must be more than 0"),
        ({"top_p": 1.01}, "top_p", "must be at most 1"),
        ({"min_p": 2.0}, "min_p", "must be at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be at least 0.01"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty", "must be at least"),
        ({"seed": -2}, "seed", "must be at least 0"),
        ({"max_tokens": 0, "score": "x"}, "max_tokens", "must be at least 1 (got 0), unless echo is true"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "must be at least 1 (got -1)"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "must be true or false (got 1)"),
        ({"seed": MAX_SEED + 1}, "seed", f"must be at most {MAX_SEED}"),
        ({"seed": True}, "seed", "must be a whole number"),
        ({"ignore_eos": 1}, "ignore_eos", "must be true or false (got 1)"),
        ({"stop": ""}, "stop", "a stop string must not be empty"),
        ({"stop": ["x", ""]}, "stop", "a stop string must not be empty"),
        ({"stop": NUL}, "stop", f"a stop string {NUL_SAID}"),
        ({"stop": ["x", SURROGATE]}, "stop", f"a stop string {SURROGATE_SAID}"),
        ({"stop": ["x"] * 17}, "stop", "must have at most 16 entries"),
        ({"stop": [3]}, "stop", "must be a text (got 3)"),
        ({"stop": b"x"}, "stop", "must be a list"),
        ({"priority": 10}, "priority", "must be a whole number from 0 to 9 (got 10, a number)"),
        ({"priority": -1}, "priority", "must be a whole number from 0 to 9"),
        ({"priority": True}, "priority", "must be a whole number from 0 to 9 (got true)"),
        ({"priority": 5.0}, "priority", "must be a whole number from 0 to 9"),
        ({"max_attempts": 0}, "max_attempts", "must be a whole number from 1 to 100"),
        ({"deadline": datetime(2026, 1, 1)}, "deadline", "must have a time zone, e.g. datetime.now(timezone"),
        ({"scheduled_at": datetime(2026, 1, 1)}, "scheduled_at", "must have a time zone"),
        ({"deadline": 60}, "deadline", "must be a datetime or a timedelta (got 60, a number)"),
        ({"deadline": timedelta.max}, "deadline", "lies beyond the calendar"),
        ({"scheduled_at": timedelta.max}, "scheduled_at", "lies beyond the calendar"),
        ({"model": "two words"}, "model", "must be a name of letters, digits and . _ : + / @ - (got 'two"),
        ({"model": ""}, "model", "must be a name"),
        ({"model": "m" * 201}, "model", "must be a name"),
        ({"model": 3}, "model", "must be a name"),
        ({"batch": ""}, "batch", "must be a text of 1 to 200 characters (got '')"),
        ({"batch": "b" * 201}, "batch", "must be a text of 1 to 200 characters"),
        ({"batch": NUL}, "batch", NUL_SAID),
        ({"custom_id": SURROGATE}, "custom_id", SURROGATE_SAID),
        ({"custom_id": 12}, "custom_id", "must be a text of 1 to 512 characters"),
        ({"idempotency_key": "k" * 256}, "idempotency_key", "must be a text of 1 to 255 characters"),
        ({"idempotency_key": NUL}, "idempotency_key", NUL_SAID),
        ({"metadata": [1]}, "metadata", "must be a mapping that JSON can hold"),
        ({"metadata": {"a": math.nan}}, "metadata", "is not JSON: Out of range float values"),
        ({"metadata": {"a": {1, 2}}}, "metadata", "is not JSON: Object of type set is not JSON"),
        ({"metadata": {"a": NUL}}, "metadata", "contains a NUL character"),
        ({"metadata": {"a": [{NUL: 1}]}}, "metadata", "contains a NUL character"),
        ({"metadata": {"a": SURROGATE}}, "metadata", "contains a lone surrogate (U+D800)"),
        ({"temprature": 1.0}, "temprature", "is not supported: did you mean temperature?"),
        ({"max_token": 1}, "max_token", "is not supported: did you mean max_tokens?"),
        (
            {"xyzzy": 1},
            "xyzzy",
            "is not supported: remove it; docs/file-formats.md lists what there is",
        ),
    ],
)
def test_a_bad_value_fails_with_the_name_of_its_field(
    settings: Mapping[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        JobSpec.parse("prompt", JobSpec.defaults(settings)).row("0" * 32, NOW, 3)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ("", "prompt", "is empty"),
        (NUL, "prompt", NUL_SAID),
        (SURROGATE, "prompt", f"{SURROGATE_SAID}; decode the input properly before enqueueing"),
        (b"bytes", "prompt", "must be a text, a list of messages or of token ids, not bytes"),
        (None, "prompt", "must be a text, a list of messages or of token ids, not NoneType"),
        ({"prompt": None}, "prompt", "is missing; give a prompt (a text) or messages (a list)"),
        ({"prompt": "x", "messages": []}, "prompt", "give either prompt or messages, not both"),
        ({"messages": "hello"}, "messages", "must be a list of messages, not a text"),
        (7, "prompt", "must be a text, a list of messages or of token ids, not int"),
        (
            {"prompt": {"role": "user"}},
            "prompt",
            "must be a text, a list of messages or of token ids, not dict",
        ),
        ([], "prompt", "is empty"),
        (["hello"], "prompt[0]", "must be a token id (a whole number) or a message, not a text"),
        ([1.5], "prompt[0]", "must be a token id (a whole number) or a message, not a number"),
        ({"messages": []}, "messages", "the list is empty"),
        ({"messages": ["hello"]}, "messages[0]", "must be an object"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"content": "x"}], "messages[0].role", "is missing"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "must be 'system', 'developer', "),
        ([{"role": "user", "content": None}], "messages[0].content", "is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content", "must be a text, not a number"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", 'must be {"type": '),
        ([{"role": "user", "content": "x", "name": "<y>"}], "messages[0].name", "must have 1 to 256 letters"),
        ([{"role": "user", "content": "x", "names": "y"}], "messages[0].names", "is not supported"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [1]}],
            "messages[1].tool_calls[0]",
            'must be {"id": ..., "type": "function"',
        ),
        ([{"role": "user", "content": NUL}], "messages[0].content", NUL_SAID),
        ([{"role": "user", "content": SURROGATE}], "messages[0].content", SURROGATE_SAID),
    ],
)
def test_a_bad_prompt_fails_with_its_place(prompt: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        JobSpec.parse(prompt)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: {message}")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_texts_and_chats_of_any_sequence_of_mappings_are_kept_as_they_are() -> None:
    message = {"role": "user", "content": "grüße 👋\n\t"}
    assert JobSpec.parse("grüße 👋\n\t").text == "grüße 👋\n\t"
    for chat in ([message], (message,), [MappingProxyType(message)], iter([message])):
        spec = JobSpec.parse(chat)  # type: ignore[arg-type]
        assert (spec.text, spec.messages, spec.prompt) == (None, [message], [message])


def test_minus_one_is_off_for_top_k_and_any_seed_for_seed() -> None:
    params = JobSpec.defaults({"top_k": -1, "seed": -1, "temperature": 0.5}).params
    assert params == GenerationParams(temperature=0.5)
    asked = JobSpec.parse({"prompt": "p", "seed": -1, "top_k": -1}, JobSpec.defaults({"seed": 7, "top_k": 9}))
    rows = [asked.row("0" * 32, NOW, 3) for _ in range(4)]
    assert len({row["seed"] for row in rows} - {7}) == 4 and {row["params"]["top_k"] for row in rows} == {0}
    assert all(0 <= row["seed"] <= MAX_SEED for row in rows)


def test_no_token_may_be_asked_for_beside_an_echo() -> None:
    params = JobSpec.parse({"prompt": "p", "max_tokens": 0, "echo": True, "min_tokens": 3}).params
    assert params.only_echo and not GenerationParams(max_tokens=1, echo=True).only_echo
    assert from_stored(stored(params)) == params


def test_whole_numbers_are_good_where_fractions_are_and_one_stop_string_needs_no_list() -> None:
    params = JobSpec.defaults({"temperature": 0, "top_p": 1, "stop": "END"}).params
    assert (params.temperature, params.top_p, params.stop) == (0.0, 1.0, ("END",))
    assert GenerationParams.parse({"stop": ["a", "b"]}).stop == ("a", "b")


def test_metadata_may_hold_what_only_looks_like_a_nul() -> None:
    metadata = {"regex": "\\u0000", "text": "ünï\n", "deep": [1, None, {"x": 0.5}]}
    assert JobSpec.defaults({"metadata": metadata}).metadata == metadata


def test_metadata_that_contains_itself_is_refused() -> None:
    metadata: dict[str, Any] = {}
    metadata["self"] = metadata
    with pytest.raises(InvalidParameterError, match="metadata: is not JSON: Circular reference"):
        JobSpec.defaults({"metadata": metadata})


@given(st.text(st.characters(codec=None, categories=None)))
def test_unstorable_says_so_exactly_of_nul_and_lone_surrogates(text: str) -> None:
    bad = any(character == "\x00" or "\ud800" <= character <= "\udfff" for character in text)
    assert (unstorable(text) is not None) is bad


def test_a_seed_is_drawn_where_none_is_given_and_spreads_over_63_bits() -> None:
    rows = [JobSpec.parse("p").row("0" * 32, NOW, 3) for _ in range(64)]
    seeds = {row["seed"] for row in rows}
    assert len(seeds) == 64
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert max(seeds) > 2**56  # 64 draws below it: one in 2**448
    assert all("seed" not in row["params"] for row in rows)
    given_seed = JobSpec.parse({"prompt": "p", "seed": 0}).row("0" * 32, NOW, 3)
    assert given_seed["seed"] == 0


def test_parameters_and_options_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        GenerationParams().max_tokens = 3
    with pytest.raises(FrozenInstanceError):
        JobSpec().priority = 3  # type: ignore[misc]


def test_errors_say_their_docstring_where_they_are_given_no_words() -> None:
    assert str(InvalidRequestError()) == "The request can never run as it stands."


def test_a_row_says_nothing_of_what_came_later_unless_it_is_asked_for() -> None:
    first = {
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "stop",
        "ignore_eos",
    }
    assert stored(GenerationParams(seed=1)).keys() == first
    asked = GenerationParams(stop_token_ids=(4, 2), min_tokens=3, seed=1)
    assert stored(asked).items() >= {("min_tokens", 3)}
    assert GenerationParams.parse(stored(asked) | {"seed": 1}) == asked


def test_one_id_stands_for_a_list_of_one() -> None:
    assert GenerationParams.parse({"stop_token_ids": 7}).stop_token_ids == (7,)
