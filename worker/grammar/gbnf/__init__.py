"""GBNF, llama.cpp's language of grammars: read into a tree, checked, and written as llguidance takes it."""

from nightmill.worker.grammar.gbnf.parser import parse
from nightmill.worker.grammar.gbnf.recognise import is_gbnf
from nightmill.worker.grammar.gbnf.tree import GbnfError
from nightmill.worker.grammar.gbnf.writer import to_lark

__all__ = ["GbnfError", "is_gbnf", "parse", "to_lark"]
