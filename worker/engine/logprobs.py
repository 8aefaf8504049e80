"""The log-probabilities that requests asked for, as records that grow with their tokens.

A record is a token's log-probability, then the ids of the likeliest tokens, then theirs: 1 + 2 N words of 4
bytes for the N that a request asked for. A runner returns room for the most that there can be; that would be
160 bytes a token, of which most rows want few.
"""

from dataclasses import dataclass

import numpy as np

from nightmill.worker.runners.base import FOUND, NO_LOGPROBS, FoundArray

WORD = 4


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities of a request's tokens.

    token_ids  those of its prompt that it asked about, then those that were drawn
    given      how many of them are of the prompt
    likely     how many of the likeliest tokens come with each
    records    one for each token; of the first token of a text, which follows nothing, NaN
    """

    token_ids: tuple[int, ...]
    given: int
    likely: int
    records: bytes


def narrowed(told: Logprobs, likely: int) -> Logprobs:
    """The same with fewer of the likeliest tokens."""
    if likely == told.likely:
        return told
    words = np.frombuffer(told.records, dtype=np.int32).reshape(-1, 1 + 2 * told.likely)
    first = 1 + told.likely
    columns = (words[:, : 1 + likely], words[:, first : first + likely])
    records = np.concatenate(columns, axis=1).tobytes()
    return Logprobs(told.token_ids, told.given, likely, records)


def likely_of(logprobs: int | None, prompt_logprobs_from: int | None) -> int:
    """`DRAW.likely` of the draws of a request with these parameters."""
    if logprobs is not None:
        return logprobs
    return NO_LOGPROBS if prompt_logprobs_from is None else 0


def record_bytes(likely: int) -> int:
    """The length of a record."""
    return WORD * (1 + 2 * likely)


def of_nothing(likely: int) -> bytes:
    """The record of a token that follows nothing."""
    words = np.zeros(1 + 2 * likely, dtype=np.float32)
    words[0] = np.nan
    words[1 : 1 + likely].view(np.int32)[:] = -1
    return words.tobytes()


class Records:
    """Log-probabilities that a launch found (R,), as a packed record for each row."""

    def __init__(self, found: FoundArray) -> None:
        self._words = np.ascontiguousarray(found).view(np.int32).reshape(len(found), FOUND.itemsize // WORD)
        self._most = (self._words.shape[1] - 1) // 2
        self._packed: dict[int, bytes] = {}

    def of(self, row: int, likely: int) -> bytes:
        """The record of a row that asked for so many of the likeliest tokens."""
        packed = self._packed.get(likely)
        if packed is None:
            words, first = self._words, 1 + self._most
            columns = (words[:, : 1 + likely], words[:, first : first + likely])
            packed = self._packed[likely] = np.concatenate(columns, axis=1).tobytes()
        size = record_bytes(likely)
        return packed[row * size : (row + 1) * size]
