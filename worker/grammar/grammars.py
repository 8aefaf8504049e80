"""Compiled grammars by what rows ask for: each is compiled once, and the engine does not wait for it."""

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import LifoQueue

from nightmill.jobs.contract import Constrained, ConstraintKind
from nightmill.jobs.errors import ConstraintError
from nightmill.worker.engine.constraints import Begin
from nightmill.worker.grammar.checker import Checker, Limits, UncheckedError
from nightmill.worker.grammar.matching import Grammar, Matchings
from nightmill.worker.grammar.tokens import GrammarTokens, grammar_tokens
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary

COMPILERS = 4  # grammars compiled at once: one that takes seconds delays no others but with three of its like
_ROWS_OF_A_LEXER = 4  # that follow each other
_KEPT = 256  # compiled grammars that are kept for further rows, and
_KEPT_BYTES = 32 << 20  # of their sources: what is compiled takes some 400 times as much


@dataclass(slots=True)
class _Known:
    """A grammar that rows have asked for, and its lexers: of texts that share one, one is asked at a time."""

    begins: list[Future[Begin]] = field(default_factory=list)
    grammar: Grammar | None = None  # the first, once it is compiled
    rows: int = 0


class Grammars(Matchings):
    """The grammars of one model's texts, and what asks the texts that obey them.

    `vocab`: token ids are below this. What matchers know of the vocabulary is made while the caller goes on.
    A process that checks is started when a grammar first comes.
    """

    def __init__(
        self, vocabulary: Vocabulary, vocab: int, *, limits: Limits | None = None, threads: int | None = None
    ) -> None:
        super().__init__(threads)
        self._limits = limits or Limits()
        self._known: OrderedDict[Constrained, _Known] = OrderedDict()
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammars")
        # The one that was used last is asked first: most nights need one process.
        self._checkers: LifoQueue[Checker] = LifoQueue()
        self._all_checkers = [Checker(self._limits) for _ in range(COMPILERS)]
        for checker in self._all_checkers:
            self._checkers.put(checker)
        self._tokens = self._pool.submit(grammar_tokens, vocabulary, vocab)
        self._vocabulary, self._vocab = vocabulary, vocab
        self._marked: GrammarTokens | None = None
        self._marking = threading.Lock()
        self.compiled = 0

    def compile(self, asked: Constrained) -> Future[Begin]:
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

    def _compile(self, asked: Constrained, known: _Known) -> Begin:
        checker = self._checkers.get()
        try:
            lark = checker.check(asked)
        finally:
            self._checkers.put(checker)
        tokens = self._tokens_of_calls() if asked.kind is ConstraintKind.CALLS else self._tokens.result()
        began = time.monotonic()
        grammar = Grammar(asked, lark, tokens, self._limits.parser)
        grammar.seconds = time.monotonic() - began
        if grammar.fault:
            raise ConstraintError(f"{asked.kind}: {grammar.fault[:500]}")
        known.grammar = grammar
        return grammar.begin

    def _another(self, known: _Known) -> Future[Begin]:
        """Another lexer of a grammar, once it is compiled; the first again where that takes long."""
        another: Future[Begin] = Future()

        def make(grammar: Grammar) -> None:
            another.set_result(grammar.another().begin)

        def go_on(first: Future[Begin]) -> None:
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

    def _tokens_of_calls(self) -> GrammarTokens:
        """Made when a call must first be made: most nights have none."""
        with self._marking:
            if self._marked is None:
                self._marked = grammar_tokens(self._vocabulary, self._vocab, marked=True)
            return self._marked

    def _forget(self) -> None:
        """Let go of those that were asked for longest ago; rows that have begun keep theirs."""
        size = sum(_size(asked, known) for asked, known in self._known.items())
        while len(self._known) > 1 and (len(self._known) > _KEPT or size > _KEPT_BYTES):
            size -= _size(*self._known.popitem(last=False))


def _size(asked: Constrained, known: _Known) -> int:
    return len(asked.text) * len(known.begins)


def _unchecked(compiled: Future[Begin]) -> bool:
    return compiled.done() and isinstance(compiled.exception(), UncheckedError)
