"""The cases of `llm`, the command and its Python interface, with a model named in its settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

from reporting import BASE_URL, CASE_SECONDS, FOLDER, KEY, MODEL, case, run_cases

USER = Path(FOLDER) / "llm"
USER.mkdir()
(USER / "extra-openai-models.yaml").write_text(
    f"- model_id: chat\n  model_name: {MODEL}\n  api_base: {BASE_URL}\n  api_key_name: mill\n"
    "  supports_schema: true\n  supports_tools: true\n"
    f"- model_id: completion\n  model_name: {MODEL}\n  api_base: {BASE_URL}\n  api_key_name: mill\n"
    "  completion: true\n"
)
(USER / "keys.json").write_text(json.dumps({"mill": KEY}))
os.environ["LLM_USER_PATH"] = str(USER)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}},
        "required": ["mood"],
    }
)


# Seeds: a model this small may end at once, and that a text is empty is no fault of the server.
def llm(*arguments: str) -> str:
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CASE_SECONDS, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@case
def models() -> None:
    assert "OpenAI Chat: chat" in llm("models")


@case
def chat() -> None:
    assert llm("-m", "chat", "Say hello.", "-o", "max_tokens", "8", "-o", "seed", "7").strip()


@case
def chat_with_defaults() -> None:
    assert llm("-m", "chat", "Say hello.", "-s", "You are brief.").strip()


@case
def chat_at_once() -> None:
    assert llm("-m", "chat", "--no-stream", "Say hello.", "-o", "max_tokens", "8", "-o", "seed", "7").strip()


@case
def conversation_goes_on() -> None:
    llm("-m", "chat", "Say hello.", "-o", "max_tokens", "8", "-o", "seed", "7")
    assert llm("-c", "Again.", "-o", "max_tokens", "8", "-o", "seed", "7").strip()
    tokens = json.loads(llm("logs", "--json", "-n", "1"))[0]
    assert tokens["input_tokens"] > 0 and tokens["output_tokens"] > 0


@case
def schema() -> None:
    for more in ((), ("--no-stream",)):
        assert json.loads(llm("-m", "chat", "I am glad.", "--schema", SCHEMA, *more))["mood"] in (
            "good",
            "bad",
        )


@case
def completion() -> None:
    assert llm("-m", "completion", "Once upon a time", "-o", "max_tokens", "8", "-o", "seed", "7").strip()


@case
def tools_are_offered() -> None:
    function = 'def weather(city: str) -> str:\n    "Get the weather."\n    return "20 degrees"\n'
    llm("-m", "chat", "Say hello.", "--functions", function, "-o", "max_tokens", "24", "-o", "seed", "1")


if __name__ == "__main__":
    run_cases()
