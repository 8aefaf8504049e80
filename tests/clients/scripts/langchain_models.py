"""The cases of LangChain's models: OpenAI (completions), ChatOpenAI (also by responses), ChatAnthropic."""

import asyncio
from typing import Any, Literal

import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr
from reporting import BASE_URL, KEY, MODEL, URL, case, run_cases


class Verdict(BaseModel):
    """A verdict on a text."""

    mood: Literal["good", "bad"]


@tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """Get the weather of a city."""
    return f"20 degrees in {city}"


# Seeds: a model this small may end at once, and that a text is empty is no fault of the server.
def completions(**more: Any) -> OpenAI:
    return OpenAI(base_url=BASE_URL, api_key=SecretStr(KEY), model=MODEL, **({"seed": 7} | more))


def chats(**more: Any) -> ChatOpenAI:
    seed = {} if more.get("use_responses_api") else {"seed": 7}  # which that API does not have
    return ChatOpenAI(base_url=BASE_URL, api_key=SecretStr(KEY), model=MODEL, **(seed | more))


@case
def openai_invoke() -> None:
    assert completions().invoke("Once upon a time")


@case
def openai_batch() -> None:
    texts = completions(max_tokens=6).batch(["Once", "In the night", "The mill"])
    assert len(texts) == 3 and any(texts)


@case
def openai_generate() -> None:
    result = completions(max_tokens=6, n=2, best_of=2).generate(["Once", "In the night"])
    assert [len(generations) for generations in result.generations] == [2, 2]
    assert result.llm_output is not None and result.llm_output["token_usage"]["total_tokens"] > 0


@case
def openai_stream() -> None:
    assert "".join(completions(max_tokens=6).stream("Once upon a time"))


@case
async def openai_async() -> None:
    model = completions(max_tokens=6)
    assert await asyncio.gather(model.ainvoke("Once"), model.ainvoke("In the night"))


@case
def chat_invoke() -> None:
    answer = chats().invoke("Say hello.")
    assert answer.content and answer.usage_metadata is not None and answer.usage_metadata["total_tokens"] > 0


@case
def chat_messages() -> None:
    messages = [
        SystemMessage("You are brief."),
        HumanMessage("Weather in Paris?", name="anna"),
        AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1"}]),
        ToolMessage("20 degrees", tool_call_id="call_1"),
        HumanMessage([{"type": "text", "text": "Thanks."}]),
    ]
    assert chats(max_tokens=8).bind_tools([get_weather]).invoke(messages).usage_metadata


@case
def chat_batch() -> None:
    answers = chats(max_tokens=4).batch(["Say hello.", "Say good night.", "Say yes."])
    assert len(answers) == 3


@case
def chat_stream() -> None:
    chunks = list(chats(max_tokens=8, stream_usage=True).stream("Say hello."))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk  # type: ignore[assignment]
    assert whole.content and whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0


@case
async def chat_async_stream() -> None:
    assert [chunk async for chunk in chats(max_tokens=8).astream("Say hello.")]


@case
def chat_chain() -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "You are brief."), ("human", "Summarise: {text}")])
    chain = prompt | chats(max_tokens=8) | StrOutputParser()
    assert chain.invoke({"text": "The mill by the river."})


@case
def chat_tool() -> None:
    answer = chats().bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?")
    (call,) = answer.tool_calls
    assert "20 degrees" in get_weather.invoke(call).content


@case
def chat_tool_streamed() -> None:
    chunks = list(chats().bind_tools([get_weather], tool_choice="get_weather").stream("Weather in Paris?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk  # type: ignore[assignment]
    assert [call["name"] for call in whole.tool_calls] == ["get_weather"]


@case
def chat_strict_tool() -> None:
    for model in (chats(), chats(streaming=True)):
        bound = model.bind_tools([get_weather], tool_choice="get_weather", strict=True)
        (call,) = bound.invoke("Weather in Paris?").tool_calls
        assert call["args"]["city"] in ("Paris", "Oslo")


@case
def chat_any_tool() -> None:
    model = chats().bind_tools([get_weather], tool_choice="any")
    assert model.invoke("Weather in Paris?").tool_calls


@case
def structured_output() -> None:
    assert isinstance(chats().with_structured_output(Verdict).invoke("I am glad."), Verdict)


@case
def structured_output_by_function() -> None:
    model = chats().with_structured_output(Verdict, method="function_calling")
    assert isinstance(model.invoke("I am glad."), Verdict)


@case
def structured_output_by_json_mode() -> None:
    """The model may write any object in this mode: that it writes one is all that can be asked for."""
    model = chats(temperature=0).with_structured_output(None, method="json_mode", include_raw=True)
    question = 'I am glad. Answer in JSON, as {"mood": "good"}.'
    try:
        text = model.invoke(question)["raw"].text
    except openai.LengthFinishReasonError as error:
        text = error.completion.choices[0].message.content or ""
    assert text.lstrip().startswith("{")


@case
def chat_logprobs() -> None:
    answer = chats(max_tokens=3).bind(logprobs=True, top_logprobs=2).invoke("Say hello.")
    assert answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]


@case
def responses_invoke() -> None:
    answer = chats(use_responses_api=True, max_tokens=16).invoke("Say hello.")
    assert answer.text and answer.usage_metadata is not None


@case
def responses_stream() -> None:
    chunks = list(chats(use_responses_api=True, max_tokens=16).stream("Say hello."))
    assert "".join(chunk.text for chunk in chunks)


@case
def responses_tool() -> None:
    model = chats(use_responses_api=True).bind_tools([get_weather], tool_choice="get_weather")
    question = HumanMessage("Weather in Paris?")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    result = get_weather.invoke(call)
    model = chats(use_responses_api=True, max_tokens=16).bind_tools([get_weather])
    assert model.invoke([question, answer, result]).usage_metadata


@case
def responses_structured_output() -> None:
    model = chats(use_responses_api=True).with_structured_output(Verdict)
    assert isinstance(model.invoke("I am glad."), Verdict)


@case
def responses_previous() -> None:
    model = chats(use_responses_api=True, use_previous_response_id=True, max_tokens=16)
    first = model.invoke([HumanMessage("Say hello.")])
    assert model.invoke([HumanMessage("Say hello."), first, HumanMessage("Again.")]).text


@case
def anthropic_invoke() -> None:
    model = _anthropic(max_tokens=16)
    assert model.invoke([SystemMessage("You are brief."), HumanMessage("Say hello.")]).content


@case
def anthropic_stream() -> None:
    assert "".join(chunk.text for chunk in _anthropic(max_tokens=16).stream("Say hello."))


@case
def anthropic_tool() -> None:
    answer = _anthropic().bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?")
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]


def _anthropic(**more: Any) -> ChatAnthropic:
    return ChatAnthropic(
        base_url=URL, api_key=SecretStr(KEY), model_name=MODEL, timeout=None, stop=None, **more
    )


@case
def embeddings() -> None:
    made = OpenAIEmbeddings(
        base_url=BASE_URL,
        api_key=SecretStr(KEY),
        model=MODEL,
        check_embedding_ctx_length=False,  # with it ids of OpenAI's tokenizer are sent, not texts
        model_kwargs={"extra_body": {"pooling": "mean"}},
    )
    first, second = made.embed_documents(["Once", "In the night"])
    assert len(first) == len(second) and first != second
    assert made.embed_query("Once") == first


@case
def embeddings_are_refused() -> None:
    embeddings = OpenAIEmbeddings(
        base_url=BASE_URL, api_key=SecretStr(KEY), model=MODEL, check_embedding_ctx_length=False
    )
    try:
        embeddings.embed_query("Once")
    except openai.BadRequestError as error:
        assert "not made for embeddings" in error.message
    else:
        raise AssertionError("it was not refused")


if __name__ == "__main__":
    run_cases()
