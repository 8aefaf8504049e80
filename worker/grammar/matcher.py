"""Matchers of many texts, moved and asked together: what the engine calls between two steps."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from llguidance import LLExecutor, LLMatcher

from nightmill.jobs.base.contract import Constrained, ConstraintKind
from nightmill.worker.engine.constraints import Faults
from nightmill.worker.grammar.checker import ParserLimits
from nightmill.worker.grammar.dead_ends import dead_end
from nightmill.worker.grammar.source import complete
from nightmill.worker.grammar.thoughts import of_answer
from nightmill.worker.grammar.tokens import GrammarTokens
from nightmill.worker.runners.base import IntArray

QUICK_SECONDS = 0.1
"""The longest that a grammar may have taken to compile to be compiled again, as between two steps."""
_FULL = "too many states"
"""Part of llguidance's error if a lexer has no room left. A new lexer helps against no other error."""
_OWN_STATES = 8_000
"""Most states of a lexer that one text has for itself: some 5 MB, so that each of 2,000 texts may have one.

With the 50,000 that texts share, 64 of "([a-z ]*e[a-z ]{17}c){3}" had taken 700 MB after 200 tokens, and went
on (a vocabulary of 49,152 tokens).
"""
_FEW_LEXERS, _FEW_MASKS = 2, 16
"""So few masks, of so few lexers, are made one after the other: threads would wait for each other's lexer.

So it is where drafts ask for the masks of one text behind several of its tokens: 0.35 ms a step, with two
threads 2 ms (benchmarks.drafts, JSON, one sequence, on two busy cores).
"""
_FEW_MOVES = 64
"""So few texts take their tokens one after the other: 2 us each, less than waking threads takes.

Steps of 4 and 16 texts under a schema took 0.43 and 0.68 ms of processor time in all, with threads for their
tokens 0.48 and 0.75 ms (benchmarks.drafts without a model).
"""
_RENEWING_SECONDS = 10.0
"""For all that are renewed between two steps: well below the silence that ends an engine."""


class Grammar:
    """A grammar that a Checker has found good, compiled on the model's tokens.

    Its texts share a lexer, and what that has found out so far: the second is quicker than the first. But of
    those that share one, only one is asked at a time.
    """

    def __init__(self, asked: Constrained, lark: str, tokens: GrammarTokens, limits: ParserLimits) -> None:
        self.tokens = tokens
        self.seconds = 0.0  # that it took to compile; whoever did so knows
        # Only a grammar of the user's own can name tokens by their numbers.
        self.may_name_tokens = of_answer(asked)[0].kind is ConstraintKind.GRAMMAR
        self.asked = asked
        self._lark, self._limits = lark, limits
        self._fresh = self.compile()

    def compile(self, most_states: int | None = None) -> LLMatcher:
        """A matcher that shares nothing; its lexer may have `most_states`, by default all that one may."""
        limits = self._limits
        if most_states is not None:
            limits = replace(limits, max_lexer_states=min(most_states, limits.max_lexer_states))
        return LLMatcher(self.tokens.tokenizer, complete(self._lark), log_level=0, limits=limits.build())

    @property
    def fault(self) -> str:
        """Why it cannot be compiled; empty if it could."""
        return self._fresh.get_error()

    @property
    def quick(self) -> bool:
        """True if the grammar was compiled quickly enough to be compiled again."""
        return self.seconds <= QUICK_SECONDS

    def another(self) -> "Grammar":
        """The same with a lexer of its own."""
        made = Grammar(self.asked, self._lark, self.tokens, self._limits)
        made.seconds = self.seconds
        return made

    def begin(self) -> "Matcher":
        """A text at its beginning."""
        return Matcher(self, self._fresh.deep_copy())


class Matcher:
    """One text and what may follow."""

    __slots__ = ("drawn", "grammar", "matcher")

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.drawn: list[int] = []

    def said(self, error: str) -> str:
        """Turn an error of the matcher into the message of the job."""
        said = " ".join(error.partition("<")[0].split())
        if said and "NoExtensionBias" not in said:
            return f"what the answer must be is too much for one step: {said[:300]}; simplify it"
        return dead_end(self.grammar.asked, self.grammar.tokens.text_of(self.drawn))

    def renewed(self, most_states: int | None, until: float) -> bool:
        """MatcherFactory again with a lexer of its own; whether that can be done before `until`, and helps.

        What texts share has a bound. Whoever reaches it must not fail for what others have put there.
        """
        full = _FULL in self.matcher.get_error()
        if not full or not self.grammar.quick or time.monotonic() >= until:
            return False
        self.matcher = self.grammar.compile(most_states)
        return self.matcher.try_consume_tokens(self.drawn) == len(self.drawn)

    def ahead(self, token_ids: Sequence[int]) -> "Matcher | None":
        """The same text with these tokens, by itself; None if one of them cannot follow."""
        copy = Matcher(self.grammar, self.matcher.deep_copy())
        if copy.matcher.try_consume_tokens(list(token_ids)) < len(token_ids):
            return None
        copy.drawn = [*self.drawn, *token_ids]
        return copy

    def forced(self) -> list[int]:
        """Tokens that spell the text that has to follow: the longest that there are, as models mostly do."""
        text = self.matcher.compute_ff_bytes().decode(errors="ignore")  # a character may be cut
        return self.grammar.tokens.tokenizer.greedy_tokenize(text) if text else []


class Matchers:
    """Asks texts of `Grammar` together, on several cores and without Python's lock."""

    def __init__(self, threads: int | None = None) -> None:
        """threads: by default four fifths of the cores, at most 32"""
        usual = min(32, max(1, len(os.sched_getaffinity(0)) * 4 // 5))
        self.threads = usual if threads is None else threads
        self._executor = LLExecutor(self.threads)

    def masks(self, constraints: Mapping[int, Matcher], masks: IntArray, /) -> Faults:
        """See `nightmill.worker.engine.constraints`."""
        self._fill(constraints.items(), masks)
        failed = [(place, one) for place, one in constraints.items() if one.matcher.is_error()]
        reasons = {place: one.matcher.get_error() for place, one in failed}
        until = time.monotonic() + _RENEWING_SECONDS
        for most_states in (_OWN_STATES, None):
            self._fill([(place, one) for place, one in failed if one.renewed(most_states, until)], masks)
            failed = [(place, one) for place, one in failed if one.matcher.is_error()]
        faults = {place: one.said(reasons[place]) for place, one in failed}
        for place, one in constraints.items():
            if one.grammar.may_name_tokens and place not in faults:
                row = masks[place]
                row &= one.grammar.tokens.ordinary
                if one.matcher.is_accepting():
                    row |= one.grammar.tokens.ends
                if not row.any():
                    faults[place] = one.said("")
        for place in faults:
            masks[place] = 0  # llguidance would end the text where it cannot go on
        return faults

    def accept(self, constraints: Sequence[Matcher], token_ids: Sequence[int], /) -> Faults:
        """See `nightmill.worker.engine.constraints`."""
        pairs = [(one.matcher, token_id) for one, token_id in zip(constraints, token_ids, strict=True)]
        if len(pairs) <= _FEW_MOVES:
            taken = [matcher.consume_token(token_id) for matcher, token_id in pairs]
        else:
            taken = self._executor.consume_token_par(pairs)
        faults: Faults = {}
        until = time.monotonic() + _RENEWING_SECONDS
        for place, (one, token_id) in enumerate(zip(constraints, token_ids, strict=True)):
            one.drawn.append(token_id)
            if not taken[place]:
                reason = one.matcher.get_error()
                if not one.renewed(_OWN_STATES, until) and not one.renewed(None, until):
                    faults[place] = one.said(reason)
        return faults

    def guess(self, constraint: Matcher, guesses: Sequence[int], most: int, /) -> Sequence[int]:
        """See `nightmill.worker.engine.constraints`."""
        may_follow = constraint.matcher.validate_tokens(list(guesses[:most])) if guesses else 0
        taken = list(guesses[:may_follow])
        if len(taken) == most:
            return taken
        end = constraint.ahead(taken) if taken else constraint
        return taken if end is None else [*taken, *end.forced()][:most]

    def ahead(self, constraint: Matcher, token_ids: Sequence[int], /) -> Matcher | None:
        """See `nightmill.worker.engine.constraints`."""
        return constraint.ahead(token_ids)

    def _fill(self, matchings: Iterable[tuple[int, Matcher]], masks: IntArray) -> None:
        known = list(matchings)
        matchers = [(one.matcher, place) for place, one in known]
        count, words = masks.shape
        if len(known) <= _FEW_MASKS and len({id(one.grammar) for _, one in known}) <= _FEW_LEXERS:
            for matcher, place in matchers:
                matcher.unsafe_compute_mask_ptr(masks[place].ctypes.data, 4 * words)
        else:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * words, count)
