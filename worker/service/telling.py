"""What rows keep of the log-probabilities that the engine found, with the spelling of their tokens."""

import codecs
from bisect import bisect_left
from collections.abc import Sequence

from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.logprobs import Packed, Spell, offsets, pack
from nightmill.jobs.parameters import MAX_JOB_LOGPROBS, GenerationParams
from nightmill.worker.engine.request import Completion
from nightmill.worker.engine.told import Told, record_bytes

__all__ = ["GrowingLogprobs", "check_told", "echo_of", "logprobs_of"]


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

    def add(self, told: Told) -> None:
        """Further tokens."""
        self._likely = told.likely
        self._token_ids += told.token_ids
        self._records += told.records
        for token_id in told.token_ids:
            self._offsets.append(self._length)
            self._length += len(self._decode(self._spell(token_id)[0]))

    def end(self, told: Told) -> None:
        """All tokens of the text, which has ended."""
        known = len(self._token_ids)
        records = told.records[known * record_bytes(told.likely) :]
        self.add(Told(told.token_ids[known:], 0, told.likely, records))

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
