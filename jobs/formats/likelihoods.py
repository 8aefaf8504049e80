"""Log-probabilities in rows: as OpenAI's API reference has them for chats and completions, and as ours."""

from collections.abc import Sequence

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.job import Answer
from nightmill.jobs.logprobs import LikelyToken, TokenLogprob

__all__ = ["openai_logprobs", "openai_tokens", "token_values"]


def token_values(tokens: Sequence[TokenLogprob]) -> list[JsonObject]:
    """Of plain rows, and of our own endpoints."""
    return [
        {"token": one.token, "id": one.id, "logprob": one.logprob, "bytes": list(one.bytes)}
        | {
            "top": [
                {"token": other.token, "id": other.id, "logprob": other.logprob, "bytes": list(other.bytes)}
                for other in one.top
            ]
        }
        for one in tokens
    ]


def openai_logprobs(answer: Answer, chat: bool) -> JsonObject | None:
    """`logprobs` of a choice; None if they were not asked for."""
    return None if answer.logprobs is None else openai_tokens(answer.logprobs, chat)


def openai_tokens(tokens: Sequence[TokenLogprob], chat: bool) -> JsonObject:
    """The same for some of its tokens."""
    return _of_chat(tokens) if chat else _of_completion(tokens)


def _of_chat(tokens: Sequence[TokenLogprob]) -> JsonObject:
    content = [_named(one) | {"top_logprobs": list(map(_named, one.top))} for one in tokens]
    return {"content": content, "refusal": None}


def _named(one: TokenLogprob | LikelyToken) -> JsonObject:
    """A token; a control token has a name, but no bytes."""
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.bytes) or None}


def _of_completion(tokens: Sequence[TokenLogprob]) -> JsonObject:
    return {
        "tokens": [one.token for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_by_text(one) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def _by_text(one: TokenLogprob) -> JsonObject | None:
    """The likeliest tokens and the one itself; of several with one text, such as U+FFFD, the likeliest."""
    if one.logprob is None:
        return None
    found: JsonObject = {}
    for other in one.top:
        found.setdefault(other.token, other.logprob)
    return {one.token: one.logprob} | found
