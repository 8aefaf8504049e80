"""Sizes of a step, and where on the GPU its arrays are: all that layers are told of a step."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from nightmill.worker.runners.gpu.states.operands import StepPieces

__all__ = ["NO_INPUTS", "Division", "PromptGroup", "StepInputs", "StepShape"]

NO_STEP_PIECES = StepPieces()


class PromptGroup(NamedTuple):
    """Prompts whose pages are widened together (`attention/prompts.py`), and their part of a step's tiles."""

    first_page: int
    pages: int
    first_tile: int
    tiles: int


class Division(NamedTuple):
    """Sizes of a step as it is divided for layers with other heads than the first (`attention/plans.py`)."""

    tiles: int
    pieces: int
    groups: tuple[PromptGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step; tiles, pieces and groups as it is divided for layers with the first one's heads."""

    tokens: int
    sequences: int
    drawn: int  # the first so many tokens were drawn: each is a chunk of its own
    draws: int  # rows that go through all layers and the last norm
    tiles: int  # pieces of the chunks of prompts
    pieces: int = 0  # of the contexts of drawn tokens; 0: decode attention goes without
    again: bool = False  # a sequence has several chunks: drawn tokens that are computed again
    given: bool = False  # some tokens are given, or rows pooled: the draws are in no order
    pooled: int = 0  # the last so many of `draws` go into embeddings, and through no head
    whole: bool = False  # all rows go through all layers and the last norm, also those that draw nothing
    groups: tuple[PromptGroup, ...] = ()  # of prompts, where their pages become elements first
    further: tuple[Division, ...] = ()  # for layers with other heads

    @property
    def gathers(self) -> bool:
        """True if the rows that draw have to be gathered; else they are all rows, in order."""
        return self.draws != self.tokens or self.given

    @property
    def heads(self) -> int:
        """Rows that go through the head."""
        return self.draws - self.pooled

    @property
    def decodes(self) -> bool:
        """True if all tokens were drawn."""
        return self.drawn == self.tokens

    @property
    def divisions(self) -> tuple[Division, ...]:
        """Sizes by plan."""
        return Division(self.tiles, self.pieces, self.groups), *self.further

    def planned(self, plan: int) -> "StepShape":
        """Return the sizes as a step is divided for layers of a plan."""
        if not plan:
            return self
        tiles, pieces, groups = self.further[plan - 1]
        return replace(self, tiles=tiles, pieces=pieces, groups=groups)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device addresses of a step's arrays (`StepBatch`), and some that are derived from them."""

    page_tables: int  # (S, table_width)
    table_width: int
    tokens: int  # (T,)
    token_slots: int  # (T,) the slot of each token's sequence
    positions: int  # (T,)
    cache_rows: int  # (T,)
    sequence_starts: int  # (S + 1,)
    context_lengths: int  # (S,)
    rows: int  # (R,) those of the draws; not there where they are all rows, in order
    draws: int  # (R,) DRAW
    tiles: int  # (tiles, 2) the pieces of prompts that prefill attention computes
    pieces: int  # (pieces, 4) the pieces of contexts that decode attention computes
    pieces_of_states: StepPieces = NO_STEP_PIECES
    further: tuple["StepInputs", ...] = ()  # the same with rows and tables of the other kinds of pages
    divisions: tuple[tuple[int, int], ...] = ()  # tiles and pieces for layers with other heads than the first

    def of(self, kind: int) -> "StepInputs":
        """Return the inputs of layers whose pages are of a kind."""
        return self.further[kind - 1] if kind else self

    def planned(self, plan: int) -> "StepInputs":
        """Return the inputs as the step is divided for layers of a plan."""
        if not plan:
            return self
        tiles, pieces = self.divisions[plan - 1]
        return replace(self, tiles=tiles, pieces=pieces)


NO_INPUTS = StepInputs(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Inputs whose addresses are all null, for launches outside a step."""
