"""What vLLM's clients ask about tokens: ids, log-probabilities of the prompt, usage with every chunk."""

from typing import Any

import openai
import pytest

from tests.unit.server.conftest import Server
from tests.unit.worker.bench import PROMPT as IDS

PLAIN: dict[str, Any] = {"model": "model", "prompt": ["Once", "Twice"], "max_tokens": 20, "seed": 3}
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 20,
}
EACH: dict[str, Any] = {"continuous_usage_stats": True}


def test_a_completion_tells_of_prompts_and_answers_in_each_choice(server: Server) -> None:
    more = {"extra_body": {"prompt_logprobs": 2, "return_token_ids": True}}
    answer = server.openai().completions.create(**PLAIN, n=2, **more)
    assert len(answer.choices) == 4
    for choice in answer.choices:
        said: Any = choice.model_dump()
        assert said["prompt_token_ids"] == list(IDS)
        assert [one and next(iter(one)) for one in said["prompt_logprobs"]] == [None, *map(str, IDS[1:])]
        assert all(one.keys() == {"logprob", "rank", "decoded_token"}
                   for by_id in said["prompt_logprobs"][1:] for one in by_id.values())  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(one.model_dump()["token_ids"]) for one in answer.choices)


def test_a_chat_tells_of_its_prompt_beside_the_choices(server: Server) -> None:
    more = {"extra_body": {"prompt_logprobs": 0, "return_token_ids": True}}
    said: Any = server.openai().chat.completions.create(**CHAT, n=2, **more).model_dump()
    assert said["prompt_token_ids"] == list(IDS) and len(said["prompt_logprobs"]) == len(IDS)
    assert all(choice["token_ids"] and "prompt_logprobs" not in choice for choice in said["choices"])
    plain: Any = server.openai().chat.completions.create(**CHAT).model_dump()
    assert (
        not {"prompt_token_ids", "prompt_logprobs"} & plain.keys() and "token_ids" not in plain["choices"][0]
    )


@pytest.mark.parametrize("value", [False, None])
def test_who_wants_no_log_probabilities_of_the_prompt_may_say_so(server: Server, value: Any) -> None:
    answer = server.openai().completions.create(**PLAIN, extra_body={"prompt_logprobs": value})
    assert "prompt_logprobs" not in answer.choices[0].model_dump()


def test_ids_of_a_stream_come_with_the_ends_of_its_choices(server: Server) -> None:
    client = server.openai()
    more: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "n": 2}
    whole = client.completions.create(**PLAIN, **more)
    ids: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for chunk in client.completions.create(**PLAIN, **more, stream=True):
        for choice in chunk.choices:
            said: Any = choice.model_dump()
            ids.setdefault(choice.index, []).extend(said.get("token_ids") or ())
            prompts |= {choice.index: said["prompt_token_ids"]} if "prompt_token_ids" in said else {}
    assert ids == {choice.index: choice.model_dump()["token_ids"] for choice in whole.choices}
    assert prompts == {key: list(IDS) for key in range(4)}
    chunks: list[Any] = [
        chunk.model_dump() for chunk in client.chat.completions.create(**CHAT, **more, seed=1, stream=True)
    ]
    assert chunks[-1]["prompt_token_ids"] == list(IDS) and chunks[-1]["choices"][0]["token_ids"]


def test_what_is_told_of_prompts_does_not_stream(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="whole answers") as caught:
        server.openai().completions.create(**PLAIN, stream=True, extra_body={"prompt_logprobs": 1})
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("last", [False, True])
def test_each_chunk_says_what_its_choice_has_cost(server: Server, last: bool) -> None:
    client = server.openai()
    options: Any = EACH | ({"include_usage": True} if last else {})
    for body, create in ((PLAIN | {"n": 2}, client.completions), (CHAT | {"n": 2}, client.chat.completions)):
        whole: Any = create.create(**body | {"seed": 3})  # type: ignore[attr-defined]
        stream = create.create(**body | {"seed": 3}, stream=True, stream_options=options)  # type: ignore[attr-defined]
        chunks: list[Any] = list(stream)
        if last:
            assert chunks[-1].choices == [] and chunks.pop().usage == whole.usage
        drawn: dict[int, list[int]] = {}
        for chunk in chunks:
            if chunk.usage is not None:
                usage = chunk.usage
                assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
                assert usage.prompt_tokens == len(IDS)
                drawn.setdefault(chunk.choices[0].index, []).append(usage.completion_tokens)
        assert sorted(drawn) == [choice.index for choice in whole.choices]
        assert all(counts == sorted(counts) for counts in drawn.values())
        assert sum(counts[-1] for counts in drawn.values()) == whole.usage.completion_tokens
        assert all(chunk.usage is not None for chunk in chunks[-1:])


def test_usage_grows_with_the_text(server: Server) -> None:
    stream = server.openai().completions.create(
        model="model", prompt="Once", max_tokens=100, seed=3, stream=True, stream_options=EACH,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts[-1] == 100 and len(set(counts)) > 2
