"""The cases of LlamaIndex, with its class for servers that speak OpenAI's API."""

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from reporting import BASE_URL, KEY, MODEL, case, run_cases


class Verdict(BaseModel):
    """A verdict on a text."""

    mood: Literal["good", "bad"]


def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """Get the weather of a city."""
    return f"20 degrees in {city}"


HELLO = [ChatMessage(role="user", content="Say hello.")]


def llm(**more: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key=KEY,
        additional_kwargs={"seed": 7},  # a model this small may end at once, with an empty text
        **({"max_tokens": 8} | more),
    )


@case
def complete() -> None:
    assert llm().complete("Once upon a time").text


@case
def complete_streamed() -> None:
    pieces = list(llm().stream_complete("Once upon a time"))
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].text


@case
def chat() -> None:
    assert llm(is_chat_model=True).chat(HELLO).message.content


@case
def chat_streamed() -> None:
    pieces = list(llm(is_chat_model=True).stream_chat(HELLO))
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].message.content


@case
async def chat_async() -> None:
    model = llm(is_chat_model=True)
    assert (await model.achat(HELLO)).message.content
    assert [piece async for piece in await model.astream_chat(HELLO)]


@case
def chat_logprobs() -> None:
    answer = llm(is_chat_model=True, logprobs=True, top_logprobs=2).chat(HELLO)
    assert answer.logprobs


@case
def tool_is_called() -> None:
    model = llm(is_chat_model=True, is_function_calling_model=True, max_tokens=200, temperature=0.1)
    tool = FunctionTool.from_defaults(get_weather)
    answer = model.chat_with_tools([tool], user_msg="Weather in Paris?", tool_required=True)
    calls = model.get_tool_calls_from_response(answer, error_on_no_tool_call=True)
    assert calls[0].tool_name == "get_weather" and calls[0].tool_kwargs["city"] in ("Paris", "Oslo")


@case
def structured_by_function() -> None:
    model = llm(is_chat_model=True, is_function_calling_model=True, max_tokens=200)
    verdict = model.structured_predict(Verdict, PromptTemplate("Judge: {text}"), text="I am glad.")
    assert isinstance(verdict, Verdict)


@case
def structured_by_schema() -> None:
    model = llm(is_chat_model=True, max_tokens=200, should_use_structured_outputs=True)
    verdict = model.structured_predict(Verdict, PromptTemplate("Judge: {text}"), text="I am glad.")
    assert isinstance(verdict, Verdict)


if __name__ == "__main__":
    run_cases()
