"""Log-probabilities, scores and echoes, asked for with OpenAI's own client."""

from typing import Any

import pytest

from tests.unit.server.conftest import Server, Slow, text_of
from tests.unit.worker.bench import PROMPT as IDS

PLAIN: dict[str, Any] = {"model": "model", "prompt": "Once"}
CHAT: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "Hello"}]}


def test_log_probabilities_come_with_the_pieces_of_a_text(server: Server) -> None:
    chat: dict[str, Any] = CHAT | {"seed": 1, "max_tokens": 90, "logprobs": True, "top_logprobs": 2, "n": 2}
    plain: dict[str, Any] = {"model": "model", "prompt": "Once", "seed": 1, "max_tokens": 90}
    plain |= {"logprobs": 1, "echo": True}
    runner = server.bench.runner
    assert isinstance(runner, Slow)

    def streamed(endpoint: Any, params: dict[str, Any], answers: int) -> list[list[Any]]:
        """The pieces of each answer: twice, what follows is computed when there is a further piece of all."""
        pauses = iter([len(runner.batches) + 40, 1 << 30])
        runner.pause_at = len(runner.batches) + 20
        pieces: list[list[Any]] = [[] for _ in range(answers)]
        told, awaited = [0] * answers, 1
        for chunk in endpoint.create(**params, stream=True):
            choice = chunk.choices[0]
            pieces[choice.index].append(choice)
            told[choice.index] += choice.logprobs is not None
            if min(told) >= awaited <= 2:
                awaited += 1
                runner.pause_at = next(pauses)
        return pieces

    with server.openai() as client:
        whole = client.chat.completions.create(**chat).choices
        pieces = streamed(client.chat.completions, chat, 2)
        told = client.completions.create(**plain).choices[0].logprobs
        (found,) = streamed(client.completions, plain, 1)
    for choice, own in zip(whole, pieces, strict=True):
        text, spelt, tokens = "", b"", []
        for piece in own:
            tokens += piece.logprobs.content if piece.logprobs else []
            text += piece.delta.content or ""
            spelt = bytes(byte for one in tokens for byte in one.bytes or ())
            assert spelt.decode(errors="replace").startswith(text)  # none comes later than its text
        assert tokens == choice.logprobs.content
        assert sum(piece.logprobs is not None for piece in own) > 2
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(piece.logprobs, name) for piece in found if piece.logprobs]
        assert len(parts) > 2
        assert [one for part in parts for one in part] == getattr(told, name)


def test_log_probabilities_scores_and_echoes_have_openais_shapes_and_ours(server: Server) -> None:
    said = text_of(1, max_tokens=9)
    asked: dict[str, Any] = CHAT | {"seed": 1, "max_tokens": 9, "logprobs": True, "top_logprobs": 3}
    with server.openai() as client:
        content = client.chat.completions.create(**asked).choices[0].logprobs.content
        plain = {"model": "model", "prompt": "Once", "seed": 1, "max_tokens": 9, "logprobs": 2, "echo": True}
        choice = client.completions.create(**plain).choices[0]
    assert content is not None and [len(one.top_logprobs) for one in content] == [3] * len(content)
    assert bytes(byte for one in content for byte in one.bytes).decode(errors="replace") == said
    assert choice.text == f"Once{said}"
    told = choice.logprobs
    assert [told.token_logprobs[0], told.top_logprobs[0], told.text_offset[0]] == [None, None, 0]
    assert (
        choice.finish_reason == "stop"
    )  # by a token that is no part of the text, and is told behind an echo
    assert len(told.tokens) == len(told.text_offset) == len(IDS) + len(content) + 1
    assert told.token_logprobs[len(IDS) : -1] == [one.logprob for one in content]
    for token, logprob, top in list(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))[
        1:
    ]:
        assert token in top and logprob is not None and len(top) <= 3
    with server.http() as http:
        scored = http.post("/v1/generate", json={"prompt": "Once", "score": ["yes", "no"]}).json()
    answers = scored["answers"]
    assert [answer["text"] for answer in answers] == ["yes", "no"] and scored["stop_reason"] == "eos"
    assert scored["text"] == max(answers, key=lambda answer: answer["logprob"])["text"]
    for answer in answers:
        assert sum(one["logprob"] for one in answer["logprobs"]) == pytest.approx(answer["logprob"])
