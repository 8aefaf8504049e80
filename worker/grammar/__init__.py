"""Constraints of rows on their answers, as masks of the tokens that may be next.

llguidance parses and matches.
"""

from nightmill.worker.grammar.checker import CheckerLimits
from nightmill.worker.grammar.grammars import Grammars
from nightmill.worker.grammar.matcher import Grammar

__all__ = ["Grammar", "Grammars", "CheckerLimits"]
