"""Text to token ids and back."""

from nightmill.worker.model.tokenizer.stream import TextStream
from nightmill.worker.model.tokenizer.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
