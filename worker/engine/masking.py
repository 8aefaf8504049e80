"""The masks of a step: what constraints allow its sequences to draw, and no end before `min_tokens`."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from nightmill.worker.engine.constraints import Faults, GrammarBackend, nothing_left
from nightmill.worker.engine.request import Sequence
from nightmill.worker.runners.base import IntArray, mask_words

FailedSequences = list[tuple[Sequence, str]]
"""Sequences that cannot go on under their constraints, and why."""


class MaskedDraw(NamedTuple):
    """A draw under a mask: which of the step's masks it is, and the guesses that it follows."""

    number: int
    sequence: Sequence
    guesses: tuple[int, ...] = ()


class Written(NamedTuple):
    """The outcome of a step's masks.

    failed    sequences that nothing can follow, and why
    unmasked  draws behind guesses for which there is no mask: what they draw may not be taken
    ahead     the constraint of each other draw behind guesses, which has accepted these
    """

    failed: FailedSequences
    unmasked: list[MaskedDraw]
    ahead: dict[int, Any]


class TokenMasks:
    """Makes the masks of steps, and has constraints follow what was drawn. `vocab` is the runner's."""

    def __init__(self, constraints: GrammarBackend, vocab: int) -> None:
        self._constraints = constraints
        self._everything = everything(vocab)

    def write(self, masks: IntArray, masked: list[MaskedDraw]) -> Written:
        """Write what `Runner.draw` takes, with the masks of these draws at their places.

        What nobody wants may draw anything, and so may what no mask was found for.
        """
        held: dict[int, Any] = {}
        ahead: dict[int, Any] = {}
        unmasked: list[MaskedDraw] = []
        latest: Any = None  # the constraint of the draw before; None behind a guess that it does not allow
        for draw in masked:
            place, sequence, guesses = draw
            if sequence.constraint is None:
                continue
            if guesses:
                latest = None if latest is None else self._constraints.ahead(latest, guesses[-1:])
            else:
                latest = sequence.constraint
            if latest is None:
                unmasked.append(draw)
                continue
            held[place] = latest
            if guesses:
                ahead[place] = latest
        if len(held) < len(masks):
            masks[[place for place in range(len(masks)) if place not in held]] = self._everything
        faults = self._constraints.masks(held, masks) if held else Faults()
        failed: FailedSequences = []
        for draw in masked:
            place, sequence, guesses = draw
            if sequence.forced:
                faults.pop(place, None)  # where it allows no other token it allows this one at most
                only(masks[place], sequence.forced[0])
                continue
            if sequence.must_go_on(len(guesses)):
                spare(masks[place], sequence.ends)
            if (banned := completing(sequence)) and place not in faults:
                take_out(masks[place], banned)
                if not masks[place].any():
                    faults[place] = nothing_left("bad_words")
            if place in faults and guesses:
                masks[place] = self._everything
                unmasked.append(draw)
            elif place in faults:
                failed.append((sequence, faults[place]))
        return Written(failed, unmasked, ahead)

    def accept(self, sequences: list[Sequence]) -> FailedSequences:
        """Move these past the tokens that were added last, so that they draw again; returns which cannot."""
        for sequence in sequences:
            sequence.let_run()
        held = [one for one in sequences if one.constraint is not None]
        if not held:
            return []
        constraints = [one.constraint for one in held]
        faults = self._constraints.accept(constraints, [one.tokens[-1] for one in held])
        return [(held[place], fault) for place, fault in faults.items()]


def everything(vocab: int) -> IntArray:
    """The mask (words,) that allows every token."""
    bits = np.zeros(mask_words(vocab) * 32, dtype=np.uint8)
    bits[:vocab] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def spare(mask: IntArray, token_ids: Iterable[int]) -> None:
    """Take these tokens out of a mask (words,), unless nothing would be left of it.

    So a text whose constraint lets it only end does end, however few tokens it has.
    """
    left = mask.copy()
    take_out(left, token_ids)
    if left.any():
        mask[:] = left


def only(mask: IntArray, token_id: int) -> None:
    """Allow one token in a mask (words,), and no other."""
    mask[:] = 0
    mask.view(np.uint32)[token_id // 32] = np.uint32(1 << token_id % 32)


def take_out(mask: IntArray, token_ids: Iterable[int]) -> None:
    """Take these tokens out of a mask (words,)."""
    words = mask.view(np.uint32)
    for token in token_ids:
        words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def completing(sequence: Sequence) -> list[int]:
    """The tokens with which an answer behind thoughts would hold a banned run."""
    runs = sequence.banned_here
    answer = (sequence.answer or []) if runs else []
    return [last for *before, last in runs if not before or answer[-len(before) :] == before]
