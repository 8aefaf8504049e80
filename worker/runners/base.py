"""The seam between policy and arithmetic: what an engine hands a runner, and what it gets back.

A runner owns the weights, the KV cache pages and, per *slot*, the state that a running sequence needs on
the device: the last token sampled, the sampling parameters and the set of tokens seen (for the repetition
penalty). The engine owns all decisions: which sequence sits in which slot, which pages it has, which
tokens are computed in a step. Launches are executed in order; `collect` returns their results in order.

Running ahead: with `depth` > 1 the engine launches the next step before it has seen the tokens of the
last one. A token that was drawn in the sequence's slot is always written as FROM_SLOT, and the runner takes
the one it last sampled there. Results of sequences that turn out to have stopped are simply dropped.

Not a number: where a row's logits are none (`worker.runners.sampling` says when), NOT_A_NUMBER is returned
in place of its token, and every other row draws as if that row were not there. The slot goes on as if token 0
had been drawn, but does not count it among the tokens seen: launches that ran ahead compute something
harmless. The pages of such a sequence may hold NaN at any of its positions, also at those before the one that
is to blame: attention computes a chunk in one piece. What a page holds past the context of whoever has it
never counts.

Sharing: block tables of several sequences may name the same page, which is then full, written by an earlier
launch and only read.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nightmill.jobs.arithmetic import Arithmetic
from nightmill.jobs.contract import GenerationParams

IntArray = npt.NDArray[np.int32]

FROM_SLOT = -1  # instead of a token id: the one last sampled in this sequence's slot
NOT_A_NUMBER = -1  # instead of a drawn token: the row's logits were no numbers to draw from


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot, new or after preemption. `token_ids`: all its tokens so far, prompt first."""

    slot: int
    token_ids: tuple[int, ...]
    params: GenerationParams
    seed: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: T tokens in S chunks, R <= S of which draw their next token. All arrays are int32.

    A chunk is some tokens of a sequence that follow each other. Those of the prompt are one chunk; of those
    that were drawn, each is a chunk of its own, also where several are computed again. So the attention of a
    position is computed in one way, whenever it is: as part of a prompt or as a token that was drawn.

    tokens          (T,)    ids, or FROM_SLOT
    positions       (T,)    place of each token in its sequence, from 0
    cache_rows      (T,)    where its key and value go: page * block_size + offset
    sequence_starts (S + 1,) chunk s has tokens[sequence_starts[s]:sequence_starts[s + 1]]
    context_lengths (S,)    tokens of its sequence up to its last one, all in the cache once this step has run
    block_tables    (S, B)  its pages in order, padded with -1; what lies past its context is never read
    slots           (S,)    the slot of its sequence
    sample_rows     (R,)    indices into `tokens`: the last token of each chunk that draws, one of a sequence
    sample_slots    (R,)    the slots of those
    drawn           the first so many chunks are tokens that were drawn; the others are of prompts
    admissions      applied before the step
    """

    tokens: IntArray
    positions: IntArray
    cache_rows: IntArray
    sequence_starts: IntArray
    context_lengths: IntArray
    block_tables: IntArray
    slots: IntArray
    sample_rows: IntArray
    sample_slots: IntArray
    drawn: int
    admissions: tuple[Admission, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens one launch drew: `tokens[i]` for `slots[i]`, in the order of `StepBatch.sample_slots`.

    NOT_A_NUMBER stands for a token that could not be drawn.
    """

    slots: IntArray
    tokens: IntArray


class Runner(Protocol):
    """Executes steps. Every method may raise RunnerError; after one, the runner is not used again."""

    kv_blocks: int
    """Pages in the KV cache."""
    block_size: int
    """Tokens in a page."""
    vocab: int
    """Token ids are below this."""
    slots: int
    """Sequences that can be admitted at once."""
    arithmetic: Arithmetic
    """What computes, with which model: results may differ in their last bits where this differs."""
    depth: int
    """Launches that may be outstanding before the oldest is collected; 1 means none runs ahead."""

    def launch(self, batch: StepBatch) -> None:
        """Start a step; may return before it is done."""
        ...

    def collect(self) -> SampledTokens | None:
        """Wait for the oldest uncollected launch and return what it drew; None where none is outstanding."""
        ...

    def close(self) -> None:
        """Release what the runner holds; safe to call twice."""
        ...
