"""Pydantic's findings are said in our words, whichever constraint of whichever model they come from."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from nightmill.jobs.base.sentences import _SENTENCES, sentence
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import InvalidParameterError, SettingsError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.options import merge_options

MODELS: tuple[type[BaseModel], ...] = (GenerationParams, Settings)
WRONG: tuple[Any, ...] = (
    *(None, "x", "", "1.5", "x" * 10_000, "\udc80", b"x", b"\xff", True, 2, -1, 0, 10**30, 2.5, -0.5, 1e9),
    *(float("nan"), float("inf"), [], ["x"], [1], ["x"] * 99, (), ("",), ("x",) * 99, {}, {"a": 1}, object()),
)


def findings(model: type[BaseModel]) -> Iterator[Any]:
    """Every error that wrong values of every field give, and those of fields that lack or are too many."""
    for values in [
        *({name: wrong} for name in model.model_fields for wrong in WRONG),
        {"nothing": 1},
        {},
        None,
    ]:
        try:
            model.model_validate(values)
        except ValidationError as error:
            yield from error.errors(include_url=False)


@pytest.mark.parametrize("model", MODELS)
def test_every_error_of_a_model_has_words_of_ours(model: type[BaseModel]) -> None:
    kinds = set()
    for error in findings(model):
        kinds.add(error["type"])
        said = sentence(error)
        assert (
            "Input should" not in said and "Value error" not in said and "{" not in said.partition("(got")[0]
        )
        assert len(said) < 400  # the formats of calls are many
    assert kinds <= _SENTENCES.keys() | {"value_error"}
    assert len(kinds) >= 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1 (got 0)"),
        ({"max_tokens": "9"}, "max_tokens: must be a whole number (got '9')"),
        ({"max_tokens": 2_000_000}, "max_tokens: must be at most 1000000 (got 2000000)"),
        ({"top_p": 0.0}, "top_p: must be more than 0 (got 0.0)"),
        ({"temperature": float("nan")}, "temperature: must be a finite number (got nan)"),
        ({"ignore_eos": 1}, "ignore_eos: must be true or false (got 1)"),
        ({"stop": ["x"] * 17}, "stop: must have at most 16 entries (got "),
        ({"stop": [""]}, "stop: a stop string must not be empty (got "),
    ],
)
def test_a_message_names_field_rule_and_value(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        GenerationParams.parse(values)
    assert str(caught.value).startswith(said)


def test_settings_and_options_say_it_in_the_same_way() -> None:
    with pytest.raises(SettingsError, match=r"^NIGHTMILL_GPU: must be a whole number \(got 'x'\)$"):
        Settings.from_env({"NIGHTMILL_GPU": "x"})
    with pytest.raises(SettingsError, match=r"^--context: must be at least 2 \(got 1\)$"):
        merge_options(Settings(), {"context": 1})


def test_an_unknown_kind_of_error_keeps_its_own_words() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(set[int]).validate_python(1)
    assert sentence(caught.value.errors()[0]).startswith("Input should be a valid set (got 1")
