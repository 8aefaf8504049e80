"""Log-probabilities in rows and responses: in OpenAI's shapes for chats and completions, and in ours."""

from collections.abc import Sequence

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.reply.logprobs import LikelyToken, TokenLogprob

__all__ = ["openai_logprobs", "openai_tokens", "token_values"]


def token_values(tokens: Sequence[TokenLogprob]) -> list[JsonObject]:
    """Format tokens for plain rows and our own endpoints."""
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


def vllm_prompt_logprobs(tokens: Sequence[TokenLogprob]) -> list[JsonObject | None]:
    """`prompt_logprobs` as vLLM has them: by token id, the prompt's own first. The first token has none.

    `rank` is null where the prompt's own token is not among those that were asked for.
    """
    return [_by_id(one) for one in tokens]


def _by_id(one: TokenLogprob) -> JsonObject | None:
    if one.logprob is None:
        return None
    ranks = {other.id: rank for rank, other in enumerate(one.top, 1)}
    found: JsonObject = {}
    tokens: list[TokenLogprob | LikelyToken] = [one, *one.top]
    for other in tokens:
        found.setdefault(
            str(other.id),
            {"logprob": other.logprob, "rank": ranks.get(other.id), "decoded_token": other.token},
        )
    return found


def openai_logprobs(answer: Answer, chat: bool) -> JsonObject | None:
    """Format `logprobs` of a choice; None if not requested."""
    return None if answer.logprobs is None else openai_tokens(answer.logprobs, chat)


def openai_tokens(tokens: Sequence[TokenLogprob], chat: bool) -> JsonObject:
    """Format some tokens as `logprobs`."""
    return _of_chat(tokens) if chat else _of_completion(tokens)


def _of_chat(tokens: Sequence[TokenLogprob]) -> JsonObject:
    content = [_named(one) | {"top_logprobs": list(map(_named, one.top))} for one in tokens]
    return {"content": content, "refusal": None}


def _named(one: TokenLogprob | LikelyToken) -> JsonObject:
    """Format a token; a control token has a name but no bytes."""
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.bytes) or None}


def _of_completion(tokens: Sequence[TokenLogprob]) -> JsonObject:
    return {
        "tokens": [one.token for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_by_text(one) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def _by_text(one: TokenLogprob) -> JsonObject | None:
    """Map the likeliest tokens and the chosen one by text; of several with one text, such as U+FFFD, the
    likeliest."""
    if one.logprob is None:
        return None
    found: JsonObject = {}
    for other in one.top:
        found.setdefault(other.token, other.logprob)
    return {one.token: one.logprob} | found
