"""Compiled grammars by what rows ask for: each is compiled once, and the engine does not wait for it."""

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import LifoQueue

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.jobs.errors import ConstraintError
from nightmill.worker.engine.constraints import MatcherFactory
from nightmill.worker.grammar.checker import Checker, CheckerLimits, UncheckedError
from nightmill.worker.grammar.matcher import Grammar, Matchers
from nightmill.worker.grammar.thoughts import marks_of, of_answer
from nightmill.worker.grammar.tokens import GrammarTokens, grammar_tokens
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary

COMPILERS = 4  # grammars compiled at once: one that takes seconds delays no others but with three of its like
_ROWS_OF_A_LEXER = 4  # that follow each other
_KEPT = 256  # compiled grammars that are kept for further rows, and
_KEPT_BYTES = 32 << 20  # of their sources: what is compiled takes some 400 times as much


@dataclass(slots=True)
class _Known:
    """A grammar that rows have asked for, and its lexers: of texts that share one, one is asked at a time."""

    begins: list[Future[MatcherFactory]] = field(default_factory=list)
    grammar: Grammar | None = None  # the first, once it is compiled
    rows: int = 0


class Grammars(Matchers):
    """The grammars of one model's texts, and what asks the texts that obey them.

    `vocab`: token ids are below this. What matchers know of the vocabulary is made while the caller goes on.
    A process that checks is started when a grammar first comes.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab: int,
        *,
        limits: CheckerLimits | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(threads)
        self._limits = limits or CheckerLimits()
        self._known: OrderedDict[Constrained, _Known] = OrderedDict()
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammars")
        # The one that was used last is asked first: most nights need one process.
        self._checkers: LifoQueue[Checker] = LifoQueue()
        self._all_checkers = [Checker(self._limits) for _ in range(COMPILERS)]
        for checker in self._all_checkers:
            self._checkers.put(checker)
        self._tokens = self._pool.submit(grammar_tokens, vocabulary, vocab)
        self._vocabulary, self._vocab = vocabulary, vocab
        self._marked: dict[frozenset[int], GrammarTokens] = {}
        self._marking = threading.Lock()
        self.compiled = 0

    def compile(self, asked: Constrained) -> Future[MatcherFactory]:
        """See `nightmill.worker.engine.constraints`. Called on the engine's thread alone."""
        known = self._known.get(asked)
        if known is None or _unchecked(known.begins[0]):
            self.compiled += 1
            known = self._known[asked] = _Known()
            known.begins.append(self._pool.submit(self._compile, asked, known))
            self._forget()
        self._known.move_to_end(asked)
        lexer = known.rows // _ROWS_OF_A_LEXER % self.threads
        known.rows += 1
        if lexer == len(known.begins):
            known.begins.append(self._another(known))
        first, own = known.begins[0], known.begins[lexer]
        return first if first.done() and not own.done() else own  # rather than wait

    def close(self) -> None:
        """See `nightmill.worker.engine.constraints`. What was compiled before stays good."""
        for checker in self._all_checkers:
            checker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, asked: Constrained, known: _Known) -> MatcherFactory:
        checker = self._checkers.get()
        try:
            lark = checker.check(asked)
        finally:
            self._checkers.put(checker)
        tokens = self._tokens_with(self._marks(asked))
        began = time.monotonic()
        grammar = Grammar(asked, lark, tokens, self._limits.parser)
        grammar.seconds = time.monotonic() - began
        if grammar.fault:
            raise ConstraintError(f"{of_answer(asked)[0].kind}: {grammar.fault[:500]}")
        known.grammar = grammar
        return grammar.begin

    def _another(self, known: _Known) -> Future[MatcherFactory]:
        """Another lexer of a grammar, once it is compiled; the first again where that takes long."""
        another: Future[MatcherFactory] = Future()

        def make(grammar: Grammar) -> None:
            another.set_result(grammar.another().begin)

        def go_on(first: Future[MatcherFactory]) -> None:
            if first.cancelled():
                another.cancel()
            elif (error := first.exception()) is not None:
                another.set_exception(error)
            elif known.grammar is None or not known.grammar.quick:
                another.set_result(first.result())
            else:
                with suppress(RuntimeError):  # closed: nobody waits any more
                    self._pool.submit(make, known.grammar)

        known.begins[0].add_done_callback(go_on)
        return another

    def _marks(self, asked: Constrained) -> frozenset[int]:
        """The tokens of marks with which such texts may be spelt."""
        alone, written = of_answer(asked)[0], marks_of(asked)
        marks = self._vocabulary.marks
        if alone.kind is ConstraintKind.CALLS:
            return marks
        return frozenset(mark for mark in marks if self._vocabulary.text_of(mark) in written)

    def _tokens_with(self, marks: frozenset[int]) -> GrammarTokens:
        """Made when they are first needed: most nights have neither calls nor thoughts."""
        if not marks:
            return self._tokens.result()
        with self._marking:
            known = self._marked.get(marks)
            if known is None:
                known = self._marked[marks] = grammar_tokens(self._vocabulary, self._vocab, marks=marks)
            return known

    def _forget(self) -> None:
        """Let go of those that were asked for longest ago; rows that have begun keep theirs."""
        size = sum(_size(asked, known) for asked, known in self._known.items())
        while len(self._known) > 1 and (len(self._known) > _KEPT or size > _KEPT_BYTES):
            size -= _size(*self._known.popitem(last=False))


def _size(asked: Constrained, known: _Known) -> int:
    return len(asked.text) * len(known.begins)


def _unchecked(compiled: Future[MatcherFactory]) -> bool:
    return compiled.done() and isinstance(compiled.exception(), UncheckedError)
