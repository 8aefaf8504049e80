"""`nightmill run` on models with states and experts: results of files, with the tokens of transformers."""

from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from tests.integration.worker.conftest import on_sqlite
from tests.support.file_runs import answered
from tests.support.thinning import thinned
from tests.tiny import expected, unpacked

TURN_END, CHANNEL = 5, 6  # control tokens of the tiny Gemma 4
NAMES = ["qwen35-q8_0", "lfm2-bf16", "gptoss-q8_0", "gemma4-bf16"]
CHATS = [
    {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "temperature": 0, **more}
    for content, more in (
        ("the quick", {}),
        ("the <turn|> quick", {}),
        ("the quick", {"logit_bias": {TURN_END: 100}}),
        ("the quick", {"logit_bias": {CHANNEL: 100}}),
    )
]


@on_sqlite
@pytest.mark.parametrize(
    "name", thinned(["qwen35-q8_0", "lfm2-bf16", "gptoss-q8_0", "gemma4-bf16"], 4, first=3)
)
def test_rows_of_a_file_become_the_tokens_of_transformers(
    name: str, jobs_client: Client, quick: Settings, tmp_path: Path
) -> None:
    """All prompts in company, three at once, so that pieces of prompts and drawn tokens share steps."""
    settings = quick.model_copy(update={"reference": True, "model": unpacked(name, tmp_path)})
    prompts = expected(name)["prompts"]
    asked = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    chats = CHATS if name.startswith("gemma4") else []
    given = [*({"prompt": one["prompt"]} | asked for one in prompts), *chats]
    rows = answered(given, settings, tmp_path)
    rows, answers = rows[: len(prompts)], rows[len(prompts) :]
    drawn = [[token["id"] for token in row["answers"][0]["logprobs"]] for row in rows]
    assert drawn == [one["greedy"] for one in prompts]
    if answers:
        plain, quoted, ended, opened = answers
        # What a user writes is letters, though <turn|> is one token where the template or the model has it.
        assert quoted["prompt_tokens"] >= plain["prompt_tokens"] + 6
        assert (ended["stop_reason"], ended["text"], ended["completion_tokens"]) == ("eos", "", 1)
        assert (opened["text"], opened["completion_tokens"]) == ("<|channel>" * 3, 3)
