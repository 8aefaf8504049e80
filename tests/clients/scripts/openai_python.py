"""The cases of OpenAI's Python client."""

import asyncio
import json
from typing import Any

import openai
import openai_responses  # noqa: F401 - it registers its cases
from openai import AsyncOpenAI, OpenAI
from openai_asking import ASK_WEATHER, HELLO, Verdict, client
from reporting import BASE_URL, KEY, MODEL, WEATHER, case, run_cases


@case
def models() -> None:
    listed = client.models.list()
    assert [model.id for model in listed] == [MODEL]
    one = client.models.retrieve(MODEL)
    assert one.id == MODEL and one.object == "model" and one.created > 0 and one.owned_by


@case
def chat_with_defaults() -> None:
    """With a seed, since a model this small may end at once, with an empty text."""
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, seed=7)
    assert answer.object == "chat.completion" and answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@case
def chat_stream_is_the_whole_answer() -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert chunks[0].choices[0].delta.role == "assistant"


@case
def chat_stream_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, seed=3, stop=["e"]) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content


@case
async def chat_many_at_once() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as many:
        answers = await asyncio.gather(
            *(
                many.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, seed=seed)
                for seed in range(8)
            )
        )
    assert len({answer.id for answer in answers}) == 8


@case
def chat_of_all_kinds_of_messages() -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "You are brief."},
        {"role": "user", "name": "anna", "content": [{"type": "text", "text": "What is the weather"}]},
        {"role": "assistant", "content": None, "tool_calls": [_call("call_1")]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 20}'},
        {"role": "user", "content": "Thanks."},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=8)  # type: ignore[list-item]
    assert answer.usage is not None and answer.usage.prompt_tokens > 30


def _call(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }


@case
def chat_with_several_answers() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@case
def seed_repeats_the_text() -> None:
    texts = {
        client.chat.completions.create(model=MODEL, messages=HELLO, seed=11, max_tokens=10, top_p=0.9)
        .choices[0]
        .message.content
        for _ in range(2)
    }
    assert len(texts) == 1


@case
def stop_ends_the_text() -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=0)
    text = whole.choices[0].text
    word = text.split()[3]
    cut = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=0, stop=[word]
    )
    assert cut.choices[0].text == text[: text.index(word)] and cut.choices[0].finish_reason == "stop"


@case
def chat_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2
        assert token.logprob == max(other.logprob for other in token.top_logprobs)


@case
def tool_by_name() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK_WEATHER,
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.id
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


@case
def tools_streamed() -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ASK_WEATHER,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,  # type: ignore[list-item]
    )
    name, arguments, finish = "", "", None
    for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert name == "get_weather" and json.loads(arguments) and finish == "tool_calls"


@case
def tools_by_default() -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK_WEATHER,
        tools=[WEATHER],
        parallel_tool_calls=True,
        max_tokens=24,  # type: ignore[list-item]
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@case
def parsed_model() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Verdict)
    assert isinstance(answer.choices[0].message.parsed, Verdict)


@case
def parsed_tool() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        tools=[openai.pydantic_function_tool(Verdict)],
        tool_choice="required",
        # Models this small may call until they are cut off, and this client raises for an answer that was.
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Verdict)


@case
def json_object() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}, max_tokens=60, seed=1
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    assert answer.choices[0].finish_reason == "length" or json.loads(text) is not None


@case
def completion_with_defaults() -> None:
    # The seed is for a text: a model this small may end at once.
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", seed=7)
    assert answer.object == "text_completion" and answer.choices[0].text


@case
def completion_of_lists() -> None:
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in ("Once", "The capital of France is")
    ]
    together = client.completions.create(
        model=MODEL, prompt=["Once", "The capital of France is"], max_tokens=6, temperature=0, n=2
    )
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]
    one = client.completions.create(model=MODEL, prompt=["Once"], max_tokens=6, temperature=0)
    assert [choice.text for choice in one.choices] == alone[:1]


@case
def completion_of_token_ids() -> None:
    ids = client.completions.create(model=MODEL, prompt=[50, 60, 70], max_tokens=5, temperature=0)
    lists = client.completions.create(model=MODEL, prompt=[[50, 60, 70]], max_tokens=5, temperature=0)
    assert ids.choices[0].text == lists.choices[0].text
    assert ids.usage is not None and ids.usage.prompt_tokens == 3


@case
def completion_of_lists_streamed() -> None:
    stream = client.completions.create(
        model=MODEL, prompt=["Once", "In the night"], max_tokens=6, stream=True
    )
    seen = {choice.index for chunk in stream for choice in chunk.choices}
    assert seen == {0, 1}


@case
def echo_with_logprobs() -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and answer.usage is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == answer.usage.prompt_tokens + 1
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert answer.choices[0].text.startswith("Once upon a time")


@case
def echo_alone() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["Once upon a time", "In the night"], max_tokens=0, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["Once upon a time", "In the night"]


@case
def embeddings() -> None:
    asked = {"model": MODEL, "input": ["Once", "In the night"], "extra_body": {"pooling": "mean"}}
    packed = client.embeddings.create(**asked, dimensions=16)
    plain = client.embeddings.create(**asked, dimensions=16, encoding_format="float")
    assert [one.index for one in packed.data] == [0, 1] and packed.usage.prompt_tokens > 0
    for one, other in zip(packed.data, plain.data, strict=True):
        assert len(one.embedding) == len(other.embedding) == 16
        assert abs(sum(number * number for number in one.embedding) - 1) < 1e-5
        pairs = zip(one.embedding, other.embedding, strict=True)
        assert max(abs(left - right) for left, right in pairs) < 1e-7


@case
def embeddings_of_a_model_that_was_not_made_for_them_are_refused() -> None:
    try:
        client.embeddings.create(model=MODEL, input="Once")
    except openai.BadRequestError as error:
        assert "not made for embeddings" in error.message
    else:
        raise AssertionError("it was not refused")


@case
def errors_have_their_classes() -> None:
    try:
        client.chat.completions.create(model="no-such-model", messages=HELLO)
    except openai.NotFoundError as error:
        assert "no-such-model" in error.message and error.param == "model"
    else:
        raise AssertionError("it was not refused")
    try:
        client.completions.create(model=MODEL, prompt="Once", temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("it was not refused")
    try:
        OpenAI(base_url=BASE_URL, api_key="another key than that").models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("it was not refused")


@case
def stream_past_the_context_is_refused() -> None:
    try:
        stream = client.completions.create(model=MODEL, prompt="hello " * 20_000, stream=True)
    except openai.BadRequestError as error:
        assert "tokens" in error.message
    else:
        raise AssertionError(f"it was not refused: {next(iter(stream))}")


if __name__ == "__main__":
    run_cases()
