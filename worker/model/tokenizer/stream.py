"""Token ids to text, one at a time."""

import codecs

from nightmill.worker.model.tokenizer.vocabulary import Vocabulary

__all__ = ["TextStream"]


class TextStream:
    """Decodes one sequence as it grows, in constant time per token, never handing out half a character."""

    __slots__ = ("_decoder", "_strip_space", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, strip_space: bool) -> None:
        self._vocabulary = vocabulary
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete now; empty while a character lacks bytes, and for control tokens."""
        data = self._vocabulary.bytes_of(token_id)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    @property
    def whole(self) -> bool:
        """True unless the last character lacks bytes."""
        return not self._decoder.getstate()[0]

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that was never completed, else empty."""
        return self._decoder.decode(b"", final=True)
