"""What rows ask of their answers, as masks of the tokens that may be next; llguidance parses and matches."""

from nightmill.worker.grammar.checker import Limits
from nightmill.worker.grammar.grammars import Grammars
from nightmill.worker.grammar.matching import Grammar

__all__ = ["Grammar", "Grammars", "Limits"]
