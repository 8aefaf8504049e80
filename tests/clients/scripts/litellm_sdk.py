"""The cases of LiteLLM, as its users and tools upon it (aider) call it."""

import asyncio
import json
from typing import Any, Literal

import litellm
from pydantic import BaseModel
from reporting import BASE_URL, KEY, MODEL, URL, WEATHER, case, run_cases

SEED = {"seed": 7}  # so that no text is empty by chance
OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, **SEED}
VLLM: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": BASE_URL, "api_key": KEY, **SEED}
TEXT: dict[str, Any] = {
    "model": f"text-completion-openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": KEY,
    **SEED,
}
UNSEEDED = {name: value for name, value in OPENAI.items() if name != "seed"}
HELLO = [{"role": "user", "content": "Say hello."}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class Verdict(BaseModel):
    mood: Literal["good", "bad"]


@case
def chat() -> None:
    answer = litellm.completion(**OPENAI, messages=HELLO, max_tokens=8)
    assert answer.choices[0].message.content and answer.usage.total_tokens > 0


@case
def chat_as_vllm() -> None:
    answer = litellm.completion(**(VLLM | {"seed": -1}), messages=HELLO, max_tokens=8, top_k=-1)
    assert answer.choices[0].message.content


@case
def chat_streamed() -> None:
    stream = litellm.completion(
        **OPENAI, messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    whole = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert whole.choices[0].message.content and whole.usage.completion_tokens > 0


@case
async def chat_async() -> None:
    answers = await asyncio.gather(
        *(litellm.acompletion(**OPENAI, messages=HELLO, max_tokens=4) for _ in range(4))
    )
    assert all(answer.choices[0].message.content is not None for answer in answers)


@case
def batch_completion() -> None:
    answers = litellm.batch_completion(**OPENAI, messages=[HELLO, HELLO, HELLO], max_tokens=4)
    assert [type(answer).__name__ for answer in answers] == ["ModelResponse"] * 3, answers


@case
def system_name_and_parts() -> None:
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "name": "anna", "content": [{"type": "text", "text": "Say hello."}]},
    ]
    assert litellm.completion(**OPENAI, messages=messages, max_completion_tokens=4).usage.completion_tokens


@case
def tool_by_name() -> None:
    answer = litellm.completion(**OPENAI, messages=HELLO, tools=[WEATHER], tool_choice=NAMED)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


@case
def editor_streams_with_a_tool() -> None:
    """As aider does with models that edit by calls of functions."""
    stream = litellm.completion(
        **OPENAI,
        messages=[{"role": "system", "content": "Act as an expert developer."}, *HELLO],
        tools=[WEATHER],
        tool_choice=NAMED,
        stream=True,
        temperature=0,
    )
    arguments, finish = "", None
    for chunk in stream:
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or ():
            arguments += call.function.arguments or ""
        finish = choice.finish_reason or finish
    assert json.loads(arguments)["city"] in ("Paris", "Oslo") and finish in ("tool_calls", "stop")


@case
def editor_streams_text() -> None:
    """As aider does with others: no bound on the answer, deltas shown as they come."""
    stream = litellm.completion(**OPENAI, messages=HELLO, stream=True, temperature=0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text


@case
def response_format_of_a_model() -> None:
    answer = litellm.completion(**OPENAI, messages=HELLO, response_format=Verdict)
    assert Verdict.model_validate_json(answer.choices[0].message.content)


@case
def logprobs() -> None:
    answer = litellm.completion(**OPENAI, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs.content[0].top_logprobs


@case
def text_completion() -> None:
    answer = litellm.text_completion(**TEXT, prompt="Once upon a time", max_tokens=6)
    assert answer.choices[0].text


@case
def text_completion_of_a_list() -> None:
    answer = litellm.text_completion(**TEXT, prompt=["Once upon a time", "In the night"], max_tokens=6)
    assert len(answer.choices) == 2 and all(choice.text for choice in answer.choices)


@case
def text_completion_as_vllm() -> None:
    answer = litellm.text_completion(**VLLM, prompt=["Once upon a time"], max_tokens=6)
    assert answer.choices[0].text


@case
def text_completion_streamed() -> None:
    stream = litellm.text_completion(**TEXT, prompt="Once upon a time", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in stream)


@case
def responses() -> None:
    answer = litellm.responses(**UNSEEDED, input="Say hello.", max_output_tokens=16)
    assert answer.output and answer.usage.output_tokens > 0


@case
def responses_streamed() -> None:
    kinds = [
        event.type
        for event in litellm.responses(**UNSEEDED, input="Say hello.", max_output_tokens=16, stream=True)
    ]
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


@case
def messages_of_anthropic() -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=URL, api_key=KEY, messages=HELLO, max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content


@case
def embeddings() -> None:
    for model in (f"openai/{MODEL}", f"hosted_vllm/{MODEL}"):
        answer = litellm.embedding(
            **(UNSEEDED | {"model": model}), input=["Once", "In the night", "Once"], pooling="mean"
        )
        first, second, third = (one["embedding"] for one in answer.data)
        assert abs(sum(number * number for number in first) - 1) < 1e-5
        assert first == third != second and answer.usage.prompt_tokens > 0


@case
def rerank() -> None:
    asked: dict[str, Any] = {"query": "What grinds grain?", "documents": ["a mill", "a mountain"]}
    found = []
    for provider, url in (("cohere", URL), ("jina_ai", BASE_URL), ("hosted_vllm", BASE_URL)):
        answer = litellm.rerank(model=f"{provider}/{MODEL}", api_base=url, api_key=KEY, **asked)
        found.append([(one["index"], one["relevance_score"]) for one in answer.results])
    assert found[0] == found[1] == found[2] and {index for index, _ in found[0]} == {0, 1}


@case
def embeddings_are_refused() -> None:
    try:
        litellm.embedding(**UNSEEDED, input=["Once"])
    except litellm.BadRequestError as error:
        assert "not made for embeddings" in str(error)
    else:
        raise AssertionError("it was not refused")


@case
def errors_have_their_classes() -> None:
    try:
        litellm.completion(**(OPENAI | {"model": "openai/no-such-model"}), messages=HELLO)
    except litellm.NotFoundError as error:
        assert "no-such-model" in str(error)
    else:
        raise AssertionError("it was not refused")
    try:
        litellm.completion(**OPENAI, messages=[{"role": "user", "content": "hello " * 20_000}])
    except litellm.ContextWindowExceededError:
        pass  # tools upon LiteLLM shorten what they ask, and ask again
    else:
        raise AssertionError("it was not refused")


if __name__ == "__main__":
    run_cases()
