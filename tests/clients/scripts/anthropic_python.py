"""The cases of Anthropic's client, against `/v1/messages`."""

from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from reporting import KEY, MODEL, URL, WEATHER, case, run_cases

client = Anthropic(base_url=URL, api_key=KEY)
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
TOOL: Any = {
    "name": "get_weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


def read(usage: Any) -> int:
    """The tokens of a prompt: `input_tokens` are those that were not cached."""
    return int(usage.input_tokens) + int(usage.cache_read_input_tokens or 0)


@case
def message() -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=16, temperature=0, system="You are brief.", messages=HELLO
    )
    assert answer.type == "message" and answer.role == "assistant" and answer.model == MODEL
    assert answer.content[0].type == "text" and answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert read(answer.usage) > 0 and answer.usage.output_tokens > 0


@case
def message_streamed() -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0, "messages": HELLO}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


@case
async def message_async() -> None:
    async with AsyncAnthropic(base_url=URL, api_key=KEY) as waiting:
        answer = await waiting.messages.create(model=MODEL, max_tokens=4, temperature=0, messages=HELLO)
    assert answer.content


@case
def blocks_of_text() -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "Say", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "hello."},
    ]
    system: list[Any] = [{"type": "text", "text": "You are brief."}]
    answer = client.messages.create(
        model=MODEL,
        max_tokens=4,
        system=system,
        messages=[{"role": "user", "content": blocks}],
        metadata={"user_id": "anna"},
    )
    assert answer.content


@case
def stop_sequence() -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 0, "messages": HELLO}
    text = client.messages.create(**asked).content[0].text
    word = text[2:5]
    cut = client.messages.create(**asked, stop_sequences=[word])
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == word
    assert cut.content[0].text == text[: text.index(word)]


@case
def tool_and_its_result() -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.messages.create(**asked, messages=messages, tool_choice={"type": "any"})
    uses = [block for block in first.content if block.type == "tool_use"]
    assert uses
    for use in uses:
        assert use.name == "get_weather" and use.input["city"] in ("Paris", "Oslo")
    assert first.stop_reason in (
        "tool_use",
        "max_tokens",
    )  # models this small may call until they are cut off
    messages += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": "20 degrees"} for use in uses
            ],
        },
    ]
    last = client.messages.create(**(asked | {"max_tokens": 16}), messages=messages)
    assert read(last.usage) > read(first.usage)


@case
def tool_streamed() -> None:
    with client.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=HELLO,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        final = stream.get_final_message()
    (use,) = (block for block in final.content if block.type == "tool_use")
    assert use.input["city"] in ("Paris", "Oslo")


@case
def tokens_counted() -> None:
    counted = client.messages.count_tokens(model=MODEL, system="You are brief.", messages=HELLO)
    answer = client.messages.create(model=MODEL, max_tokens=1, system="You are brief.", messages=HELLO)
    assert counted.input_tokens == read(answer.usage)


@case
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@case
def errors_have_their_classes() -> None:
    try:
        client.messages.create(model="no-such-model", max_tokens=4, messages=HELLO)
    except anthropic.NotFoundError as error:
        assert "no-such-model" in str(error) and error.body["type"] == "error"  # type: ignore[index]
    else:
        raise AssertionError("it was not refused")
    try:
        Anthropic(base_url=URL, api_key="another key than that").messages.create(
            model=MODEL, max_tokens=4, temperature=0, messages=HELLO
        )
    except anthropic.AuthenticationError:
        pass
    else:
        raise AssertionError("it was not refused")


if __name__ == "__main__":
    run_cases()
