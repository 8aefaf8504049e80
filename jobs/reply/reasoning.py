"""Separation of a model's reasoning from its answer, by the marks around it."""

from collections.abc import Iterator

CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
"""The marks of reasoning in models that write messages to several channels, such as gpt-oss."""
GEMMA = ("<|channel>thought", "<channel|>")
"""The marks of reasoning in Gemma 4, whose texts may have it more than once."""


class Thoughts:
    """An incremental parser that separates reasoning at the beginning from the answer.

    `again`: reasoning may follow in the answer, too.
    """

    def __init__(self, begin: str, end: str, opened: bool, *, again: bool = False) -> None:
        self._begin, self._end = begin, end
        self._again = again
        self._inside = self._within = opened
        self._over = False
        self._pending = ""  # text that is still ambiguous
        self._bare = True  # only white space since the last mark
        self._pushed = 0  # characters
        self.answer_from: int | None = None
        """Offset of the answer in the whole text, in characters: after reasoning, its first non-space
        character. None until it is known."""

    def push(self, text: str) -> Iterator[tuple[str, str]]:
        """Add a piece of the text; yields (reasoning, content) that are known now."""
        self._pushed += len(text)
        self._pending += text
        if not self._inside and not self._over:
            seen = self._pending.lstrip()
            if not seen or (self._begin.startswith(seen) and seen != self._begin):
                return
            if seen.startswith(self._begin):
                self._pending = seen.removeprefix(self._begin)
                self._inside = self._within = True
            else:
                self._over, self._bare = True, False
                if not self._again:
                    self.answer_from = self._pushed - len(self._pending)
        while self._pending:
            mark = self._end if self._within else self._begin
            place = self._pending.find(mark) if self._within or self._again else -1
            if self._within:
                yield (self._known_thoughts() if place < 0 else self._thought(place)), ""
            elif self._again:
                known = place if place >= 0 else undecided_from(self._pending, mark)
                said, self._pending = self._pending[:known], self._pending[known:]
                yield "", self._answer(said)
            else:
                yield "", self._answer(self._released())
            if place < 0:
                return
            self._pending = self._pending.removeprefix(mark)
            self._within, self._bare = not self._within, True
            self._over = self._over or not self._within

    @property
    def over(self) -> bool:
        """True once the answer has begun."""
        return self._over

    @property
    def inside(self) -> bool:
        """True once reasoning has begun, also after its end."""
        return self._inside

    def end(self) -> tuple[str, str]:
        """Return the remaining (reasoning, content) at the end of the text."""
        if self._within:
            return self._unless_blank(self._released()).rstrip(), ""
        if not self._over:
            self._over, self.answer_from = True, self._pushed - len(self._pending)
            return "", self._released()
        return "", self._answer(self._released())

    def _thought(self, place: int) -> str:
        """Release the reasoning before the end mark, which is at `place`."""
        thought, self._pending = self._pending[:place], self._pending[place:]
        return self._unless_blank(thought).rstrip()

    def _answer(self, text: str) -> str:
        """Return content of the answer, and note where it begins."""
        text = self._unless_blank(text)
        if text and self.answer_from is None:
            self.answer_from = self._pushed - len(self._pending) - len(text)
        return text

    def _known_thoughts(self) -> str:
        """Release all reasoning except a possible beginning of the end mark and the white space before it."""
        pending = self._pending
        known = len(pending[: undecided_from(pending, self._end)].rstrip())
        self._pending = pending[known:]
        return self._unless_blank(pending[:known])

    def _unless_blank(self, text: str) -> str:
        """Remove leading white space after a mark."""
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return text

    def _released(self) -> str:
        pending, self._pending = self._pending, ""
        return pending


def undecided_from(text: str, mark: str) -> int:
    """Return where a possible beginning of `mark` starts at the end of `text`; its length if there is
    none."""
    for start in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[start:]):
            return start
    return len(text)
