"""Matchers of many texts, moved and asked together: what the engine calls between two steps."""

import os
from collections.abc import Iterable, Mapping, Sequence

from llguidance import LLExecutor, LLMatcher

from nightmill.jobs.contract import Constrained, ConstraintKind
from nightmill.worker.engine.constraints import STUCK, Faults
from nightmill.worker.grammar.checker import ParserLimits
from nightmill.worker.grammar.source import complete
from nightmill.worker.grammar.tokens import GrammarTokens
from nightmill.worker.runners.base import IntArray

QUICK_SECONDS = 0.1
"""The longest that a grammar may have taken to compile to be compiled again, as between two steps."""


class Grammar:
    """A grammar that a Checker has found good, compiled on the model's tokens.

    Its texts share a lexer, and what that has found out so far: the second is quicker than the first. But of
    those that share one, only one is asked at a time.
    """

    def __init__(self, asked: Constrained, lark: str, tokens: GrammarTokens, limits: ParserLimits) -> None:
        self.tokens = tokens
        self.seconds = 0.0  # that it took to compile; whoever did so knows
        # Only a grammar of the user's own can name tokens by their numbers.
        self.may_name_tokens = asked.kind is ConstraintKind.GRAMMAR
        self._asked, self._lark, self._limits = asked, lark, limits
        self._fresh = self.compile()

    def compile(self) -> LLMatcher:
        """A matcher that shares nothing."""
        source, limits = complete(self._lark), self._limits.build()
        return LLMatcher(self.tokens.tokenizer, source, log_level=0, limits=limits)

    @property
    def fault(self) -> str:
        """Why it cannot be compiled; empty if it could."""
        return self._fresh.get_error()

    @property
    def quick(self) -> bool:
        """Whether it may be compiled again."""
        return self.seconds <= QUICK_SECONDS

    def another(self) -> "Grammar":
        """The same with a lexer of its own."""
        made = Grammar(self._asked, self._lark, self.tokens, self._limits)
        made.seconds = self.seconds
        return made

    def begin(self) -> "Matching":
        """A text at its beginning."""
        return Matching(self, self._fresh.deep_copy())


class Matching:
    """One text and what may follow."""

    __slots__ = ("drawn", "grammar", "matcher")

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.drawn: list[int] = []

    def renewed(self) -> bool:
        """Begin again with a lexer of its own; whether that can be done between two steps.

        What texts share has a bound. Whoever reaches it must not fail for what others have put there.
        """
        if not self.grammar.quick:
            return False
        self.matcher = self.grammar.compile()
        return self.matcher.try_consume_tokens(self.drawn) == len(self.drawn)


class Matchings:
    """Asks texts of `Grammar` together, on several cores and without Python's lock."""

    def __init__(self, threads: int | None = None) -> None:
        """threads: by default four fifths of the cores, at most 32"""
        self.threads = threads or min(32, max(1, len(os.sched_getaffinity(0)) * 4 // 5))
        self._executor = LLExecutor(self.threads)

    def masks(self, constraints: Mapping[int, Matching], masks: IntArray, /) -> Faults:
        """See `nightmill.worker.engine.constraints`."""
        self._fill(constraints.items(), masks)
        if failed := [(place, one) for place, one in constraints.items() if one.matcher.is_error()]:
            reasons = {place: one.matcher.get_error() for place, one in failed}
            self._fill([(place, one) for place, one in failed if one.renewed()], masks)
        faults = {place: _plain(reasons[place]) for place, one in failed if one.matcher.is_error()}
        for place, one in constraints.items():
            if one.grammar.may_name_tokens and place not in faults:
                row = masks[place]
                row &= one.grammar.tokens.ordinary
                if one.matcher.is_accepting():
                    row |= one.grammar.tokens.ends
                if not row.any():
                    faults[place] = STUCK
        for place in faults:
            masks[place] = 0  # llguidance would end the text where it cannot go on
        return faults

    def accept(self, constraints: Sequence[Matching], token_ids: Sequence[int], /) -> Faults:
        """See `nightmill.worker.engine.constraints`."""
        pairs = [(one.matcher, token_id) for one, token_id in zip(constraints, token_ids, strict=True)]
        taken = self._executor.consume_token_par(pairs)
        faults: Faults = {}
        for place, (one, token_id) in enumerate(zip(constraints, token_ids, strict=True)):
            one.drawn.append(token_id)
            if not taken[place]:
                reason = one.matcher.get_error()
                if not one.renewed():
                    faults[place] = _plain(reason)
        return faults

    def _fill(self, matchings: Iterable[tuple[int, Matching]], masks: IntArray) -> None:
        if matchers := [(one.matcher, place) for place, one in matchings]:
            count, words = masks.shape
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * words, count)


def _plain(error: str) -> str:
    """What the job is told."""
    said = " ".join(error.partition("<")[0].split())
    if not said or "NoExtensionBias" in said:
        return STUCK
    return f"what the answer must be is too much for one step: {said[:300]}; simplify it"
