"""The cases of Instructor: its modes for OpenAI's API, streams of partial objects, and Anthropic's API."""

from collections.abc import Iterable
from typing import Any, Literal

import instructor
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from reporting import BASE_URL, KEY, MODEL, case, run_cases

client = OpenAI(base_url=BASE_URL, api_key=KEY)


class Verdict(BaseModel):
    """A verdict on a text."""

    mood: Literal["good", "bad"]
    sure: bool


ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "I am glad."}]}


@case
def tools() -> None:
    verdict = instructor.from_openai(client).create(**ASKED, response_model=Verdict)
    assert isinstance(verdict, Verdict)


@case
def tools_strict() -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS_STRICT)
    assert isinstance(patched.create(**ASKED, response_model=Verdict), Verdict)


@case
def json_schema() -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(patched.create(**ASKED, response_model=Verdict), Verdict)


@case
def json_mode_is_accepted() -> None:
    """The model may write any object in this mode, so only the request is looked at."""
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON)
    sent: list[Any] = []
    patched.on("completion:response", sent.append)
    try:
        patched.create(**ASKED, response_model=Verdict, max_retries=1, max_tokens=40)
    except (InstructorRetryException, IncompleteOutputException):
        assert sent
    assert sent[0].choices[0].message.content.lstrip().startswith("{")


@case
def with_completion() -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    verdict, completion = patched.create_with_completion(**ASKED, response_model=Verdict)
    assert isinstance(verdict, Verdict) and completion.usage.total_tokens > 0


@case
def partial_objects() -> None:
    patched = instructor.from_openai(client)
    *_, last = patched.create_partial(**ASKED, response_model=Verdict)
    assert last.mood in ("good", "bad") and isinstance(last.sure, bool)


@case
def partial_objects_by_schema() -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = patched.create_partial(**ASKED, response_model=Verdict)
    assert last.mood in ("good", "bad")


@case
def list_of_objects() -> None:
    """How many there are is the model's choice, and none is a list, too."""
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    found = list(patched.create_iterable(**ASKED, response_model=Verdict, max_tokens=80, temperature=0))
    assert all(isinstance(one, Verdict) for one in found)


@case
def several_tools_at_once() -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
    sent: list[Any] = []
    patched.on("completion:response", sent.append)
    try:
        list(patched.create(**ASKED, response_model=Iterable[Verdict], max_tokens=100, max_retries=1))
    except Exception:  # a free choice of tools: this model may call none, which is not the server's doing
        assert sent
    assert sent[0].choices[0].message


@case
async def tools_async() -> None:
    patched = instructor.from_openai(AsyncOpenAI(base_url=BASE_URL, api_key=KEY))
    assert isinstance(await patched.create(**ASKED, response_model=Verdict), Verdict)


@case
def from_provider() -> None:
    patched = instructor.from_provider(f"openai/{MODEL}", base_url=BASE_URL, api_key=KEY)
    messages = ASKED["messages"]
    assert isinstance(patched.create(messages=messages, response_model=Verdict), Verdict)


@case
def responses_tools() -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    assert isinstance(patched.create(**ASKED, response_model=Verdict), Verdict)


if __name__ == "__main__":
    run_cases()
