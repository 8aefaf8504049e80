"""The cases of OpenAI's Python client for responses, files and batches; `openai_python` runs them, too."""

import io
import json
import time
from typing import Any

import openai
from openai_asking import ASK_WEATHER, FUNCTION, HELLO, Verdict, client
from reporting import MODEL, case


@case
def responses() -> None:
    answer = client.responses.create(
        model=MODEL, input="Say hello.", instructions="You are brief.", max_output_tokens=16
    )
    assert answer.output_text and answer.usage is not None and answer.status in ("completed", "incomplete")
    again = client.responses.retrieve(answer.id)
    assert again.output_text == answer.output_text
    more = client.responses.create(
        model=MODEL, input="And again.", previous_response_id=answer.id, max_output_tokens=16
    )
    assert more.previous_response_id == answer.id and more.usage is not None
    assert more.usage.input_tokens > answer.usage.input_tokens
    client.responses.delete(answer.id)
    try:
        client.responses.retrieve(answer.id)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("it was not deleted")


@case
def responses_streamed() -> None:
    text, final = "", None
    for event in client.responses.create(model=MODEL, input=HELLO, max_output_tokens=16, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert final is not None and text and final.output_text == text


@case
def responses_parsed() -> None:
    answer = client.responses.parse(model=MODEL, input=HELLO, text_format=Verdict)
    assert isinstance(answer.output_parsed, Verdict)


@case
def responses_with_tools() -> None:
    first = client.responses.create(
        model=MODEL,
        input=ASK_WEATHER,
        tools=[FUNCTION],
        tool_choice="required",  # type: ignore[list-item]
    )
    call, *_ = (item for item in first.output if item.type == "function_call")
    assert call.name == "get_weather" and json.loads(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    last = client.responses.create(
        model=MODEL,
        input=[result],
        previous_response_id=first.id,
        tools=[FUNCTION],
        max_output_tokens=16,  # type: ignore[list-item]
    )
    assert last.output


@case
def batch_of_a_file() -> None:
    bodies: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    _batch("/v1/chat/completions", bodies, lambda body: body["choices"][0]["message"]["content"])


@case
def batch_of_responses() -> None:
    bodies: dict[str, Any] = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 4}
    _batch("/v1/responses", bodies, lambda body: body["output"])


def _batch(endpoint: Any, body: dict[str, Any], content: Any) -> None:
    rows = [
        json.dumps({"custom_id": f"row-{number}", "method": "POST", "url": endpoint, "body": body})
        for number in range(3)
    ]
    file = client.files.create(file=("night.jsonl", io.BytesIO("\n".join(rows).encode())), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.3)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.request_counts is not None, batch
    assert batch.request_counts.completed == 3 and batch.output_file_id, batch
    lines = client.files.content(batch.output_file_id).text.splitlines()
    results = [json.loads(line) for line in lines]
    assert [result["custom_id"] for result in results] == ["row-0", "row-1", "row-2"]
    assert all(content(result["response"]["body"]) for result in results)
