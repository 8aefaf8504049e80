"""What a model thinks before it answers, told from the answer by the marks around it."""

CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
"""The marks of thinking in models that write messages to several channels, as gpt-oss does."""
_STRAIGHT = {CHANNELS: "<|channel|>final<|message|>"}
"""How an answer begins before which such a model has not thought."""


class Thoughts:
    """Tells what stands between the marks of thinking, once and at the beginning, from what follows."""

    def __init__(self, begin: str, end: str, opened: bool) -> None:
        self._begin, self._end = begin, end
        self._straight = _STRAIGHT.get((begin, end), "")
        self._inside, self._over = opened, False
        self._held = ""  # what is not known yet
        self._bare = True  # nothing but white space was seen since the last mark

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, content) that are known now."""
        if self._over:
            return "", self._unless_blank(text)
        self._held += text
        if not self._inside:
            seen = self._held.lstrip()
            if any(mark.startswith(seen) and seen != mark for mark in (self._begin, self._straight)):
                return "", ""
            if not seen.startswith(self._begin):
                self._over, self._bare = True, False
                held = self._released()
                if self._straight and seen.startswith(self._straight):
                    return "", seen.removeprefix(self._straight)
                return "", held
            self._held = seen.removeprefix(self._begin)
            self._inside = True
        place = self._held.find(self._end)
        if place < 0:
            return self._known_thoughts(), ""
        thought = self._unless_blank(self._held[:place]).rstrip()
        rest = self._held[place + len(self._end) :]
        self._over, self._bare, self._held = True, True, ""
        return thought, self._unless_blank(rest)

    def end(self) -> tuple[str, str]:
        """As `push`, of what was held."""
        if self._inside and not self._over:
            return self._unless_blank(self._released()).rstrip(), ""
        return "", self._released()

    def _known_thoughts(self) -> str:
        """All but what may be the end's mark and the white space before it."""
        held = self._held
        known = len(held[: undecided_from(held, self._end)].rstrip())
        self._held = held[known:]
        return self._unless_blank(held[:known])

    def _unless_blank(self, text: str) -> str:
        """Without the white space at the beginning."""
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return text

    def _released(self) -> str:
        held, self._held = self._held, ""
        return held


def undecided_from(text: str, mark: str) -> int:
    """Where the end of `text` begins that may turn out to begin `mark`; its length if nothing may."""
    for start in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[start:]):
            return start
    return len(text)
