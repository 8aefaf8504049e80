"""Separation of a model's reasoning from its answer, by the marks around it."""

CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
"""The marks of reasoning in models that write messages to several channels, such as gpt-oss."""
_STRAIGHT = {CHANNELS: "<|channel|>final<|message|>"}
"""The beginning of an answer without reasoning from such a model."""


class Thoughts:
    """An incremental parser that separates reasoning, once and at the beginning, from the answer."""

    def __init__(self, begin: str, end: str, opened: bool) -> None:
        self._begin, self._end = begin, end
        self._straight = _STRAIGHT.get((begin, end), "")
        self._inside, self._over = opened, False
        self._pending = ""  # text that is still ambiguous
        self._bare = True  # only white space since the last mark
        self._pushed = 0  # characters
        self.answer_from: int | None = None
        """Offset of the answer in the whole text, in characters: after reasoning, its first non-space
        character. None until it is known."""

    def push(self, text: str) -> tuple[str, str]:
        """Add a piece of the text; returns (reasoning, content) that are known now."""
        self._pushed += len(text)
        if self._over:
            return "", self._answer(text)
        self._pending += text
        if not self._inside:
            seen = self._pending.lstrip()
            if any(mark.startswith(seen) and seen != mark for mark in (self._begin, self._straight)):
                return "", ""
            if not seen.startswith(self._begin):
                self._over, self._bare = True, False
                pending = self._released()
                if self._straight and seen.startswith(self._straight):
                    pending = seen.removeprefix(self._straight)
                self.answer_from = self._pushed - len(pending)
                return "", pending
            self._pending = seen.removeprefix(self._begin)
            self._inside = True
        place = self._pending.find(self._end)
        if place < 0:
            return self._known_thoughts(), ""
        thought = self._unless_blank(self._pending[:place]).rstrip()
        rest = self._pending[place + len(self._end) :]
        self._over, self._bare, self._pending = True, True, ""
        return thought, self._answer(rest)

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
        if self._inside and not self._over:
            return self._unless_blank(self._released()).rstrip(), ""
        if not self._over:
            self._over, self.answer_from = True, self._pushed - len(self._pending)
        return "", self._released()

    def _answer(self, text: str) -> str:
        """Return content of the answer, and note where it begins."""
        text = self._unless_blank(text)
        if text and self.answer_from is None:
            self.answer_from = self._pushed - len(text)
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
