"""What rows keep of the log-probabilities that the engine found, with the spelling of their tokens."""

from collections.abc import Sequence

from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.logprobs import Spell, offsets, pack
from nightmill.jobs.parameters import MAX_JOB_LOGPROBS, GenerationParams
from nightmill.worker.engine.request import Completion
from nightmill.worker.engine.told import record_bytes

__all__ = ["check_told", "echo_of", "logprobs_of"]


def logprobs_of(completion: Completion, spell: Spell) -> bytes | None:
    """Of the tokens of a text, for its row; None if they were not asked for.

    Left out is what was drawn and is no part of the text: what ended it, what lies behind a stop string, and
    what an engine draws after a text that it was to score.
    """
    told = completion.told
    if told is None:
        return None
    drawn = [spell(token_id)[0] for token_id in told.token_ids[told.given :]]
    length = len(completion.text) - completion.echoed
    count = told.given + sum(offset < length for offset in offsets(drawn))
    size = count * record_bytes(told.likely)
    return pack(told.token_ids[:count], told.records[:size], told.likely, spell)


def echo_of(prompt: str | None, prompt_ids: Sequence[int], spell: Spell) -> str:
    """What a text begins with that repeats its prompt, which may be token ids."""
    if prompt is not None:
        return prompt
    return b"".join(spell(token_id)[0] for token_id in prompt_ids).decode(errors="replace")


def check_told(prompt_tokens: int, params: GenerationParams) -> None:
    """Raise InvalidParameterError if a job would have too many log-probabilities of its prompt."""
    likely = params.logprobs or 0
    count = params.n * prompt_tokens * (likely + 1)
    if count > MAX_JOB_LOGPROBS:
        raise InvalidParameterError(
            f"echo: a prompt of {prompt_tokens:,} tokens with {likely} logprobs in {params.n} answers makes "
            f"{count:,} log-probabilities, more than {MAX_JOB_LOGPROBS:,}: give a smaller logprobs or n",
            field="echo",
        )
