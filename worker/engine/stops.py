"""Decides when a text is over, and which part of it is the answer.

Order of precedence where several reasons meet on one token: end of text, a token or string that stops it,
length, context. Deadline and cancellation are looked at between steps.
"""

from collections.abc import Callable
from typing import Protocol

from nightmill.jobs.contract import StopReason
from nightmill.jobs.parameters import GenerationParams


class TextStream(Protocol):
    """Turns token ids into text; holds back bytes that are not yet a whole character."""

    def push(self, token_id: int, /) -> str:
        """Return the text that this token completes, possibly none."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


NewTextStream = Callable[[], TextStream]


class TextWatch:
    """Follows a text as it is generated and finds the first stop string in it.

    First is the one that is complete first, reading character by character; of those that end on the same
    character, the one that starts first. So the answer does not depend on where the token borders fall.
    Text that may be the beginning of a stop string is held back until that is decided. One that is complete
    within the first `after` tokens counts for nothing.
    """

    def __init__(self, stream: TextStream, stop: tuple[str, ...], after: int = 0) -> None:
        self._stream = stream
        self._stop = stop
        self._after = after
        self._pushed = 0
        self._reach = max(map(len, stop), default=1) - 1  # characters a match can begin before new text
        self._pieces: list[str] = []
        self._tail = ""  # the last `_reach` characters
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Add a token; True once a stop string is complete. Tokens pushed after that are ignored."""
        self._pushed += 1
        return self.stopped or self._add(self._stream.push(token_id))

    def finish(self) -> bool:
        """End the text, releasing what was held back; True where its last characters were a stop string."""
        return self.stopped or self._add(self._stream.flush())

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return "".join(self._pieces)

    @property
    def decided(self) -> str:
        """The text without an end that may turn out to begin a stop string."""
        text = self.text
        return text if self.stopped else text[: undecided_from(text, self._stop)]

    def _add(self, piece: str) -> bool:
        if not piece:
            return False
        window, known = self._tail + piece, len(self._tail)
        self._pieces.append(piece)
        self._tail = window[-self._reach :] if self._reach else ""
        if self._pushed <= self._after:
            return False
        places = [(stop, window.find(stop, max(0, known + 1 - len(stop)))) for stop in self._stop]
        found = [(start + len(stop), start) for stop, start in places if start >= 0]
        if found:
            text = self.text
            self._pieces = [text[: len(text) - (len(window) - min(found)[1])]]
            self.stopped = True
        return self.stopped


def undecided_from(text: str, stop: tuple[str, ...]) -> int:
    """Where the end of `text` begins that may turn out to begin a stop string; its length if nothing may."""
    reach = max(map(len, stop), default=1) - 1
    for start in range(max(0, len(text) - reach), len(text)):
        if any(one.startswith(text[start:]) for one in stop):
            return start
    return len(text)


def streamed(stream: TextStream, token_ids: list[int]) -> str:
    """Return the text of `token_ids`, read from the beginning."""
    return "".join([stream.push(token) for token in token_ids]) + stream.flush()


def reason_to_stop(
    token_id: int, *, generated: int, length: int, context: int, params: GenerationParams,
    eos_ids: frozenset[int], watch: TextWatch | None,
) -> StopReason | None:  # fmt: skip
    """Say whether a sequence is over now that `token_id` was drawn (None: it goes on).

    `generated` and `length` count the drawn tokens and all tokens, this one included; `context` is the
    most tokens that a sequence may have. Feeds the token to `watch`, unless it ends the text.
    """
    if token_id in eos_ids and not params.ignore_eos:
        return StopReason.EOS
    if token_id in params.stop_token_ids:
        return StopReason.STOP_SEQUENCE
    if watch is not None and watch.push(token_id):
        return StopReason.STOP_SEQUENCE
    if generated >= params.max_tokens:
        return StopReason.LENGTH
    if length >= context:
        return StopReason.CONTEXT_FULL
    return None
