"""OpenAI's client asks `nightmill serve` for thoughts by effort, and streams them and a call behind them."""

import json
from pathlib import Path
from typing import Any

import openai
from gguf import TokenType

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.worker.commands.process import running_worker
from tests.support.ggufs import byte_vocabulary, write_model
from tests.support.servers import http_server

TEMPLATE = (
    "{% if reasoning_effort is defined %}<|im_start|>system\n{{ reasoning_effort }}<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Bonn", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
BUDGET = 12


def test_thoughts_and_calls_come_apart_in_streams_and_usage_counts_them(
    directory: Path, broker_url: str
) -> None:
    marks = [(text, TokenType.CONTROL) for text in ("<think>", "</think>", "</tool_call>")]
    model = write_model(
        directory / "m.gguf", vocabulary=byte_vocabulary(marks), chat_template=TEMPLATE, context_length=1024
    )
    settings = Settings(
        data_dir=directory / "data",
        database_url=f"sqlite:///{directory / 'nightmill.db'}",
        broker_url=broker_url,
        model=model,
        reference=True,
    )
    with Client(settings) as client:
        client.database.migrate()
        with running_worker(client, directory / "worker.log", ["--name", "thinker"]):
            served = settings.model_copy(update={"model": None, "reference": False})
            with http_server(served, directory / "server.log") as url:
                _ask(openai.OpenAI(base_url=f"{url}/v1", api_key="none"))


def _ask(client: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": "Rain?"}]
    asked: dict[str, Any] = {
        "model": "thinker", "messages": said, "tools": [WEATHER], "tool_choice": "required",
        "parallel_tool_calls": False, "seed": 7, "max_tokens": 200,
    }  # fmt: skip
    budget = {"extra_body": {"max_reasoning_tokens": BUDGET}}
    low = client.chat.completions.create(**asked, reasoning_effort="low", **budget)
    high = client.chat.completions.create(**asked, reasoning_effort="high", **budget)
    none = client.chat.completions.create(**asked, reasoning_effort="none")
    thoughts, name, arguments, order = "", "", "", []
    stream = client.chat.completions.create(
        **asked, reasoning_effort="low", **budget, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            if piece := getattr(choice.delta, "reasoning_content", None):
                thoughts += piece
                order.append("thoughts")
            assert not choice.delta.content
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
                order.append("call")
            finish = choice.finish_reason
    assert finish == "tool_calls" and order == sorted(order, reverse=True) and order.count("thoughts") > 1
    (whole,) = low.choices[0].message.tool_calls or ()
    assert (name, arguments) == (whole.function.name, whole.function.arguments)
    assert thoughts == low.choices[0].message.reasoning_content
    assert chunk.usage is not None and low.usage is not None
    assert chunk.usage.completion_tokens_details == low.usage.completion_tokens_details
    assert chunk.usage.total_tokens == low.usage.total_tokens
    texts = set()
    for answer, most in ((low, BUDGET), (high, BUDGET), (none, 0)):
        (call,) = answer.choices[0].message.tool_calls or ()
        parsed = json.loads(call.function.arguments)
        assert parsed["place"] in ("Bonn", "Oslo") and parsed["days"] <= 9
        assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
        usage = answer.usage
        assert usage is not None and usage.completion_tokens_details is not None
        # Those that close the thoughts come on top of the budget.
        assert min(most, 1) <= usage.completion_tokens_details.reasoning_tokens <= most + 8 * bool(most)
        assert usage.completion_tokens > usage.completion_tokens_details.reasoning_tokens
        texts.add(getattr(answer.choices[0].message, "reasoning_content", None))
    assert len(texts) == 3 and None in texts  # the template has told the efforts apart
    more = client.chat.completions.create(
        **asked | {
            "messages": [
                *said,
                low.choices[0].message.to_dict(),
                {"role": "tool", "tool_call_id": whole.id, "content": "wet"},
            ]
        },
        reasoning_effort="low",
        **budget,
    )  # fmt: skip
    assert more.usage is not None
    assert more.usage.prompt_tokens > low.usage.prompt_tokens and more.choices[0].message.tool_calls
