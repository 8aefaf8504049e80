"""Compare the special tokens that a template writes with the vocabulary: find those out of reach."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nightmill.worker.model.tokenizer.tokenizer import Tokenizer

__all__ = ["Reach", "reach"]

_CERTAIN: Final = r"<\|[^|<>\s]{1,60}\|>|<｜[^｜<>\s]{1,60}｜>"  # nothing else is written so
_LIKELY: Final = r"</?[a-z]+(?:_[a-z]+)+>|</?s>|\[/?[A-Z][A-Z_]{2,30}\]"
_SPECIAL = re.compile(f"{_CERTAIN}|{_LIKELY}")
_SURELY = re.compile(_CERTAIN)


@dataclass(frozen=True, slots=True)
class Reach:
    """The special tokens that a template writes and that become characters.

    ordinary  the vocabulary has them, typed as ordinary text
    unknown   the vocabulary lacks them
    """

    ordinary: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def fault(self) -> str | None:
        """A message of what is wrong, and what to do; None for a template that has all its tokens."""
        faults = []
        if self.ordinary:
            faults.append(
                f"the chat template writes {_listed(self.ordinary)}, which the file types as ordinary text "
                "(tokenizer.ggml.token_type): each becomes several tokens and not the one that the model "
                "knows; convert the model anew with a current llama.cpp"
            )
        if self.unknown:
            faults.append(
                f"the chat template writes {_listed(self.unknown)}, which the vocabulary lacks: it may be "
                "another model's template; give the file its own with gguf-new-metadata --chat-template"
            )
        return "; ".join(faults) or None


def reach(source: str, texts: Iterable[str], tokenizer: Tokenizer) -> Reach:
    """Look at a template, and at texts that it has rendered."""
    written = {text for rendered in texts for text in _SPECIAL.findall(rendered)}
    known = dict.fromkeys(tokenizer.vocabulary.tokens)
    ordinary = [
        text
        for text in sorted(written | set(_SURELY.findall(source)))
        if text in known
        and text not in tokenizer.markers
        and len(tokenizer.encode(text, special=True, add_bos=False)) > 1
    ]
    unknown = [text for text in sorted(written) if _SURELY.fullmatch(text) and text not in known]
    return Reach(tuple(ordinary), tuple(unknown))


def _listed(texts: tuple[str, ...]) -> str:
    shown = ", ".join(texts[:8])
    return shown if len(texts) <= 8 else f"{shown} and {len(texts) - 8} more"
