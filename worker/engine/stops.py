"""Decides when a text is over, and which part of it is the answer.

Order of precedence where several reasons meet on one token: end of text, a token or string that stops it,
length, context. Deadline and cancellation are looked at between steps.
"""

from collections.abc import Callable
from typing import Protocol

from nightmill.jobs.base.contract import Markup, StopReason
from nightmill.jobs.reply.structure import structure_of
from nightmill.jobs.request.parameters import GenerationParams


class TokenDecoder(Protocol):
    """Turns token ids into text; holds back bytes that are not yet a whole character."""

    def push(self, token_id: int, /) -> str:
        """Return the text that this token completes, possibly none."""
        ...

    @property
    def whole(self) -> bool:
        """True unless the last character lacks bytes."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


NewTokenDecoder = Callable[[], TokenDecoder]


class TextWatch:
    """Follows a text as it is generated and finds the first stop string in it.

    First is the one that is complete first, reading character by character; of those that end on the same
    character, the one that starts first. So the answer does not depend on where the token borders fall.
    Text that may be the beginning of a stop string is held back until that is decided. One that is complete
    within the first `after` tokens of the answer counts for nothing. The text ends before the stop string,
    or if that is to be `included`, behind it.

    thinking  the marks of thoughts, and whether the prompt has opened them: these are not part of the answer,
              and a stop string counts in them only if it has one of the marks itself
    """

    def __init__(
        self,
        stream: TokenDecoder,
        stop: tuple[str, ...],
        after: int = 0,
        thinking: tuple[str, str, bool] | None = None,
        *,
        included: bool = False,
    ) -> None:
        self._stream = stream
        self._included = included
        self._stop = stop
        self._after = after
        self._thoughts = None
        if thinking is not None:
            self._thoughts = structure_of(Markup(None, thinking[:2], thinking[2]))
        marks = () if thinking is None else thinking[:2]
        self._anywhere = tuple(one for one in stop if any(mark in one for mark in marks))
        self._begin: int | None = 0 if thinking is None else None  # the answer's first character
        self.answer_from: int | None = self._begin
        """Tokens up to the end of thoughts; None before that, or while nobody knows whether there are any."""
        self._length = 0  # characters of the text
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
        if self.stopped or self._add(self._stream.flush()):
            return True
        if self._thoughts is None or self._begin is not None:
            return False
        self._thoughts.end()  # a text that may have begun with a mark, and has not
        return self._began() is not None and self._find(self.text, 0)

    @property
    def closable(self) -> bool:
        """True in thoughts, where marks may end them: not in a header, nor in the middle of a character."""
        inside = self._thoughts is not None and self.answer_from is None and self._thoughts.closable
        return inside and self._stream.whole

    @property
    def text(self) -> str:
        """All text so far, without the stop string unless that is included."""
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
        self._length += len(piece)
        self._tail = window[-self._reach :] if self._reach else ""
        if self._thoughts is not None and self._begin is None:
            self._thoughts.push(piece)
            begin = self._began()
            if begin is not None:  # what was not known to be of the answer may end it
                window, known = self.text, min(self._length - len(piece), begin)
        return self._find(window, known)

    def _began(self) -> int | None:
        """Return the answer's first character, once it is known."""
        assert self._thoughts is not None
        self._begin = self._thoughts.answer_from
        if self._thoughts.over and self.answer_from is None:
            self.answer_from = 0 if self._begin == 0 else self._pushed
        return self._begin

    def _find(self, window: str, known: int) -> bool:
        """Look for stop strings that end in `window`, the end of the text, behind its first characters."""
        answer_from = 0 if self.answer_from is None else self.answer_from
        if self._after and (self._begin is None or self._pushed - answer_from <= self._after):
            return False
        before = self._length - len(window)
        first = None if self._begin is None else max(0, self._begin - before)
        found = []
        for stop in self._stop if first is not None else self._anywhere:
            least = 0 if first is None or stop in self._anywhere else first
            start = window.find(stop, max(least, known + 1 - len(stop)))
            found += [(start + len(stop), start)] * (start >= 0)
        if found:
            end, start = min(found)
            self._pieces = [self.text[: before + (end if self._included else start)]]
            self.stopped = True
        return self.stopped


def undecided_from(text: str, stop: tuple[str, ...]) -> int:
    """Return the index from which `text` may turn out to begin a stop string; its length if nothing may."""
    reach = max(map(len, stop), default=1) - 1
    for start in range(max(0, len(text) - reach), len(text)):
        if any(one.startswith(text[start:]) for one in stop):
            return start
    return len(text)


def streamed(stream: TokenDecoder, token_ids: list[int]) -> str:
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
        if watch is not None and params.include_stop_str_in_output:
            watch.push(token_id)
        return StopReason.STOP_SEQUENCE
    if watch is not None and watch.push(token_id):
        return StopReason.STOP_SEQUENCE
    if generated >= params.max_tokens:
        return StopReason.LENGTH
    if length >= context:
        return StopReason.CONTEXT_FULL
    return None
