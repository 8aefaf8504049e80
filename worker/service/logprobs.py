"""Log-probabilities as rows keep them: those that the engine found, with the spelling of their tokens."""

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.reply.logprobs import Packed, Spell, offsets, pack
from nightmill.jobs.request.parameters import MAX_JOB_LOGPROBS, GenerationParams
from nightmill.worker.engine.logprobs import Logprobs, narrowed, record_bytes
from nightmill.worker.engine.request import Completion, Request

__all__ = [
    "GrowingLogprobs",
    "apart",
    "check_prompt_logprobs",
    "echo_of",
    "logprobs_of",
    "with_prompt_logprobs",
]


def logprobs_of(completion: Completion, spell: Spell, *, drawn: bool = True) -> bytes | None:
    """Pack the log-probabilities of a text's tokens for its row; None if they were not asked for.

    Left out is what was drawn and is no part of the text: what ended it, and what lies behind a stop string.
    Behind a prompt that is told, too, all that was drawn stays: as OpenAI's clients know it, the last tokens
    are those of the answer, and who scores a text drops them by their number. Unless `drawn`, nothing that
    was drawn is told: an engine draws a token after a text that it was to score, too.
    """
    logprobs = completion.logprobs
    if logprobs is None:
        return None
    count = len(logprobs.token_ids)
    if not drawn:
        count = logprobs.given
    elif not logprobs.given:
        spelt = [spell(token_id)[0] for token_id in logprobs.token_ids]
        count = sum(offset < len(completion.text) - completion.echoed for offset in offsets(spelt))
    size = count * record_bytes(logprobs.likely)
    return pack(logprobs.token_ids[:count], logprobs.records[:size], logprobs.likely, spell)


def with_prompt_logprobs(request: Request, likely: int) -> Request:
    """A request that is told of its prompt, too: each token, and `likely` of the likeliest in its place."""
    params = request.params
    logprobs = params.model_copy(update={"logprobs": max(params.logprobs or 0, likely)})
    return replace(request, params=logprobs, prompt_logprobs_from=0)


def apart(completion: Completion, params: GenerationParams, spell: Spell) -> tuple[Completion, bytes | None]:
    """Separate the log-probabilities of a job's first answer from those that the row keeps of its prompt.

    With `prompt_logprobs`, the answer's request asks for the more of the two, for prompt and answer. Returns
    the completion with what its parameters ask for, and the prompt's, packed; None if not asked for.
    """
    logprobs = completion.logprobs
    if logprobs is None or params.prompt_logprobs is None:
        return completion, None
    of_prompt = narrowed(logprobs, params.prompt_logprobs)
    size = logprobs.given * record_bytes(params.prompt_logprobs)
    packed = pack(
        logprobs.token_ids[: logprobs.given], of_prompt.records[:size], params.prompt_logprobs, spell
    )
    if params.logprobs is None:
        return replace(completion, logprobs=None), packed
    own = narrowed(logprobs, params.logprobs)
    if not params.echo:
        size = logprobs.given * record_bytes(own.likely)
        own = Logprobs(own.token_ids[own.given :], 0, own.likely, own.records[size:])
    return replace(completion, logprobs=own), packed


class GrowingLogprobs:
    """The log-probabilities of a text that grows, for those who read it meanwhile."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._likely = 0
        self._token_ids: list[int] = []
        self._offsets: list[int] = []
        self._records = bytearray()
        self._length = 0  # characters of all these tokens
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def add(self, logprobs: Logprobs) -> None:
        """Further tokens."""
        self._likely = logprobs.likely
        self._token_ids += logprobs.token_ids
        self._records += logprobs.records
        for token_id in logprobs.token_ids:
            self._offsets.append(self._length)
            self._length += len(self._decode(self._spell(token_id)[0]))

    def end(self, logprobs: Logprobs) -> None:
        """All tokens of the text, which has ended."""
        known = len(self._token_ids)
        records = logprobs.records[known * record_bytes(logprobs.likely) :]
        self.add(Logprobs(logprobs.token_ids[known:], 0, logprobs.likely, records))

    def packed(self, first: int, end: int) -> Packed | None:
        """From token `first` on, those that begin before character `end`; None if there are none."""
        behind = bisect_left(self._offsets, end, first)
        if behind == first:
            return None
        size = record_bytes(self._likely)
        records = bytes(self._records[first * size : behind * size])
        data = pack(self._token_ids[first:behind], records, self._likely, self._spell)
        return Packed(first, tuple(self._offsets[first:behind]), data)


def echo_of(prompt: str | None, prompt_ids: Sequence[int], spell: Spell) -> str:
    """Return the beginning of a text that repeats its prompt, which may be token ids."""
    if prompt is not None:
        return prompt
    return b"".join(spell(token_id)[0] for token_id in prompt_ids).decode(errors="replace")


def check_prompt_logprobs(prompt_tokens: int, params: GenerationParams) -> None:
    """Raise InvalidParameterError if a job would have too many log-probabilities of its prompt."""
    likely = params.logprobs or 0
    count = params.n * prompt_tokens * (likely + 1)
    if params.echo and params.logprobs is not None and count > MAX_JOB_LOGPROBS:
        raise InvalidParameterError(
            f"echo: a prompt of {prompt_tokens:,} tokens with {likely} logprobs in {params.n} answers makes "
            f"{count:,} log-probabilities, more than {MAX_JOB_LOGPROBS:,}: give a smaller logprobs or n",
            field="echo",
        )
    likely = params.prompt_logprobs or 0
    if params.prompt_logprobs is not None and (count := prompt_tokens * (likely + 1)) > MAX_JOB_LOGPROBS:
        raise InvalidParameterError(
            f"prompt_logprobs: {likely} of them for a prompt of {prompt_tokens:,} tokens are {count:,} "
            f"log-probabilities, more than {MAX_JOB_LOGPROBS:,}: give a smaller number",
            field="prompt_logprobs",
        )
