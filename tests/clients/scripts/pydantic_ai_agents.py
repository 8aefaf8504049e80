"""The cases of pydantic-ai: agents over Chat Completions, the Responses API and Anthropic's."""

from typing import Any, Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from reporting import BASE_URL, KEY, MODEL, URL, case, run_cases


class Verdict(BaseModel):
    """A verdict on a text."""

    mood: Literal["good", "bad"]


provider = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
chat_model = OpenAIChatModel(MODEL, provider=provider)
responses_model = OpenAIResponsesModel(MODEL, provider=provider)
anthropic_model = AnthropicModel(
    MODEL, provider=AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY))
)
SEEDED: Any = {"max_tokens": 24, "seed": 1}  # a model this small may end at once, with an empty text
SHORT: Any = {"max_tokens": 16, "temperature": 0}


@case
def text() -> None:
    result = Agent(chat_model, instructions="You are brief.").run_sync("Say hello.", model_settings=SHORT)
    assert result.output and result.usage.output_tokens > 0


@case
async def text_streamed() -> None:
    async with Agent(chat_model).run_stream("Say hello.", model_settings=SHORT) as result:
        assert [piece async for piece in result.stream_text(delta=True)]


@case
def conversation_goes_on() -> None:
    agent = Agent(chat_model)
    first = agent.run_sync("Say hello.", model_settings=SHORT)
    second = agent.run_sync("Again.", message_history=first.all_messages(), model_settings=SHORT)
    assert second.usage.input_tokens > first.usage.input_tokens


@case
def output_by_tool() -> None:
    result = Agent(chat_model, output_type=Verdict).run_sync("I am glad.")
    assert isinstance(result.output, Verdict)


@case
def output_by_schema() -> None:
    result = Agent(chat_model, output_type=NativeOutput(Verdict)).run_sync("I am glad.")
    assert isinstance(result.output, Verdict)


@case
async def output_streamed() -> None:
    async with Agent(chat_model, output_type=NativeOutput(Verdict)).run_stream("I am glad.") as result:
        assert isinstance(await result.get_output(), Verdict)


@case
def tools_are_offered() -> None:
    agent = Agent(chat_model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"20 degrees in {city}"

    assert agent.run_sync("Say hello.", model_settings=SEEDED).output


@case
def responses_text() -> None:
    assert Agent(responses_model).run_sync("Say hello.", model_settings=SHORT).output


@case
async def responses_streamed() -> None:
    async with Agent(responses_model).run_stream("Say hello.", model_settings=SHORT) as result:
        assert [piece async for piece in result.stream_text(delta=True)]


@case
def responses_output_by_tool() -> None:
    agent = Agent(responses_model, output_type=Verdict)
    assert isinstance(agent.run_sync("I am glad.").output, Verdict)


@case
def anthropic_text() -> None:
    assert Agent(anthropic_model).run_sync("Say hello.", model_settings=SHORT).output


@case
def anthropic_output_by_tool() -> None:
    agent = Agent(anthropic_model, output_type=Verdict)
    assert isinstance(agent.run_sync("I am glad.").output, Verdict)


if __name__ == "__main__":
    run_cases()
