"""Chat messages to token ids by the model's own template, which a process apart renders."""

from nightmill.worker.model.chat.renderer import Limits
from nightmill.worker.model.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "Limits"]
