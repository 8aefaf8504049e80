"""The seam between policy and arithmetic: what an engine hands a runner, and what it gets back.

A runner owns the weights, the KV cache pages and, per *slot*, the state that a running sequence needs on
the device: the last token sampled, the sampling parameters and the set of tokens seen (for the repetition
penalty). The engine owns all decisions: which sequence sits in which slot, which pages it has, which
tokens are computed in a step. Launches are executed in order; `collect` returns their results in order.

Running ahead: with `depth` > 1 the engine launches the next step before it has seen the tokens of the
last one. A token that was drawn in the sequence's slot is always written as FROM_SLOT, and the runner takes
the one it last sampled there. Results of sequences that turn out to have stopped are simply dropped.

Masks: a draw may be restricted to the tokens that a mask allows. A mask hangs on the sequence's last token,
and takes time to make, so it is not part of the step: `launch` starts the forward pass, which may take that
token from the slot. While it runs, the launches before it are collected, and `draw` brings the masks. Until
then nothing of the step is drawn; a step without masks needs no `draw`.

Drafts: a step may draw several tokens of one sequence, which then follow tokens that the engine guessed: each
is a chunk of its own, computed and drawn as if it were known to be right. No launch that follows says
FROM_SLOT for that sequence, until one has drawn a single token of it; and its draws have no penalties. Where
there are states, each guess has gone through them: a step may copy a slot's states to a snapshot before it
computes (`StepBatch.keeps`), and a later one take them back (`StepBatch.restores`), in which the tokens since
then are computed again.

Not a number: where a row's logits are none (`worker.runners.sampling` says when), NOT_A_NUMBER is returned
in place of its token, and every other row draws as if that row were not there. The slot goes on as if token 0
had been drawn, but does not count it among the tokens seen: launches that ran ahead compute something
harmless. The pages of such a sequence may hold NaN at any of its positions, also at those before the one that
is to blame: attention computes a chunk in one piece. What a page holds past the context of whoever has it
never counts.

States: some layers keep, in place of keys and values, a state of fixed size for each slot. It begins as
zeros, or as a snapshot, when a sequence is admitted, and each launch brings it further, so a sequence's
tokens must come in order, each once. Prompts go through it in chunks of STATE_CHUNK positions, which begin at
multiples of that, whatever a step computes: so a piece of a prompt ends at such a multiple or with the prompt
(`Runner.prompt_grid`). Tokens that were drawn go through it one by one, also where several are computed
again.

Snapshots: after a piece of a prompt, a slot's states may be copied to one of the runner's snapshots, and
sequences with the same tokens may begin with it.

Embeddings: a step may be asked for the hidden states behind the last norm of some rows of prompts (POOL).
They are added one by one in the order of positions to the sum of the sequence's slot: so a sum has the same
bits however its prompt was cut into chunks. The sum of one row is that row.

Sharing: page tables of several sequences may name the same page, which is then full, written by an earlier
launch and only read.

Kinds of pages: layers that need other tokens of a sequence, or keep other amounts of each, have pages of
their own (`PageKind`). All pages are equally large, so that any may become one of any kind; how many tokens a
page holds is a matter of its kind. Of a kind with a window, a sequence has only the pages that later tokens
can still see. Entries of its tables before these name the page behind the last one, in which a runner with
such kinds keeps finite numbers: what it holds never counts.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.request.parameters import MAX_LOGPROBS, GenerationParams

IntArray = npt.NDArray[np.int32]
DrawArray = npt.NDArray[np.void]

DRAW = np.dtype(
    [(name, np.int32) for name in ("row", "slot", "position", "mask", "given", "likely")], align=True
)
"""A token that a step draws, or one that is given and of which it tells the log-probability.

row       index into the step's tokens of the one that it follows; the last of its chunk, if it is drawn
slot      of its sequence; -1: the token is given, and nothing is drawn
position  its place in the sequence, from 0: one more than that of the row
mask      which of the step's masks it obeys, -1: none. Masks are numbered from 0 in the order of draws
given     the token that is given, -1: it is drawn
likely    how many of the most likely tokens are told with its log-probability, -1: not even that is. It is 0
          to MOST_LIKELY, and not -1 if the token is given
"""
UNMASKED = -1
NOT_GIVEN = -1
NO_LOGPROBS = -1

MOST_LIKELY = MAX_LOGPROBS
FOUND = np.dtype(
    [
        ("logprob", np.float32),
        ("tokens", np.int32, (MOST_LIKELY,)),
        ("logprobs", np.float32, (MOST_LIKELY,)),
    ],
    align=True,
)
"""The log-probability of a token, and the most likely tokens with theirs, the likeliest first.

Of equals that with the lower id is first. Only the first `DRAW.likely` count. Where fewer tokens can follow,
-1 stands behind them.
"""
FoundArray = npt.NDArray[np.void]

POOL = np.dtype([(name, np.int32) for name in ("row", "rows", "slot", "begins", "ends")], align=True)
"""Rows of a prompt whose hidden states are added to the sum of their slot; at most one of a slot in a step.

row     index into the step's tokens of the first
rows    how many
slot    of their sequence
begins  1: the sum is zero before
ends    1: the sum is told once they are added
"""
PoolArray = npt.NDArray[np.void]
SumArray = npt.NDArray[np.float64]
NO_POOLS: PoolArray = np.zeros(0, dtype=POOL)

STATE_CHUNK = 64
"""Positions that layers with states compute at once of a prompt, from each multiple of so many on."""

NO_PAGE = -1  # instead of one that was given back, since no later token sees what it held
FROM_SLOT = -1  # instead of a token id: the one last sampled in this sequence's slot
NO_SNAPSHOT = -1  # instead of one that states begin as: zeros
NOT_A_NUMBER = -1  # instead of a drawn token: the row's logits were no numbers to draw from


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot, new or after preemption.

    token_ids  all its tokens so far, prompt first; the last `answered` of them are of the answer
    banned     runs of tokens that the answer must not hold
    snapshot   what its states begin as
    """

    slot: int
    token_ids: tuple[int, ...]
    params: GenerationParams
    seed: int
    answered: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    snapshot: int = NO_SNAPSHOT


@dataclass(frozen=True, slots=True)
class PageKind:
    """A kind of page: it holds keys and values of `tokens` consecutive tokens for the layers of that kind.

    window  a token sees so many, itself included; None: all before it
    tokens  a multiple of the runner's `page_size`
    stride  a page's first entry in tables is its number times this; the others follow, each of `page_size`
            tokens
    """

    window: int | None
    tokens: int
    stride: int = 1

    def first_seen(self, position: int) -> int:
        """The first position that the token at a position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def pages_for(self, tokens: int) -> int:
        """Pages of it that hold `tokens` tokens."""
        return -(-tokens // self.tokens)

    def pages_at(self, tokens: int) -> int:
        """Pages of it that a sequence of so many tokens keeps for those to come."""
        return self.pages_for(tokens) - self.first_seen(tokens) // self.tokens


@dataclass(frozen=True, slots=True)
class KindRows:
    """`cache_rows` and `page_tables` of a step for a kind of pages."""

    cache_rows: IntArray
    page_tables: IntArray


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: T tokens in S chunks, R <= S of which draw their next token. All but `draws` is int32.

    A chunk is some tokens of a sequence that follow each other. Those of the prompt are one chunk; of those
    that were drawn, each is a chunk of its own, also where several are computed again. So the attention of a
    position is computed in one way, whenever it is: as part of a prompt or as a token that was drawn.

    tokens          (T,)    ids, or FROM_SLOT
    positions       (T,)    place of each token in its sequence, from 0
    cache_rows      (T,)    where its key and value go: entry of its table * page_size + offset
    sequence_starts (S + 1,) chunk s has tokens[sequence_starts[s]:sequence_starts[s + 1]]
    context_lengths (S,)    tokens of its sequence up to its last one, all in the cache once this step has run
    page_tables    (S, B)  an entry for each `page_size` of its tokens, in order, padded with -1; what lies
                            past its context is never read
    slots           (S,)    the slot of its sequence
    draws           (R,)    what is drawn (DRAW), in the order of rows; then what is given. One of a sequence,
                            but for drafts
    keeps           slots whose states are copied before the step, each with the number of the snapshot
    restores        slots whose states become a snapshot before the step, each with its number
    drawn           the first so many chunks are tokens that were drawn or guessed; the others are of prompts
    admissions      applied before the step
    snapshots       slots whose states are copied after it, each with the number of the snapshot that they
    become
    further         rows and tables of the other kinds of pages, in order; those above are of the first kind
    pools           (P,)    rows of prompts that are added to embeddings (POOL); only where `Runner.embeds`
    text_types      (T,)    1 for tokens of the second text of a pair, else 0; None: all are 0
    following       (S,)    the token behind each chunk where it is known, else -1; (0,): of none
    guesses         drafts are made: a runner that `predicts` is to guess behind the draws
    """

    tokens: IntArray
    positions: IntArray
    cache_rows: IntArray
    sequence_starts: IntArray
    context_lengths: IntArray
    page_tables: IntArray
    slots: IntArray
    draws: DrawArray
    drawn: int
    admissions: tuple[Admission, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    pools: PoolArray = field(default_factory=lambda: NO_POOLS)
    text_types: IntArray | None = None
    keeps: tuple[tuple[int, int], ...] = ()
    restores: tuple[tuple[int, int], ...] = ()
    further: tuple[KindRows, ...] = ()
    following: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    guesses: bool = True

    @property
    def kinds(self) -> tuple[KindRows, ...]:
        """Rows and tables of all kinds of pages."""
        return (KindRows(self.cache_rows, self.page_tables), *self.further)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that one launch drew, in the order of `StepBatch.draws`.

    tokens  (R,) ids, also those that were given; NOT_A_NUMBER where the logits were no numbers
    found   (R,) FOUND; rows that asked for nothing hold anything. None if no row asked
    sums    (E, width) float64, of those of `StepBatch.pools` that end, in their order; None if none does
    guesses (R, N) ids that the runner guesses to follow, -1 from where it guesses no more; None: it does not
    """

    tokens: IntArray
    found: FoundArray | None = None
    sums: SumArray | None = None
    guesses: IntArray | None = None


def make_draws(rows: IntArray, slots: IntArray, positions: IntArray) -> DrawArray:
    """Draws (R,) of these rows, slots and positions, each (R,), without masks and log-probabilities."""
    draws = np.empty(len(rows), dtype=DRAW)
    draws["row"], draws["slot"], draws["position"] = rows, slots, positions
    draws["mask"], draws["given"], draws["likely"] = UNMASKED, NOT_GIVEN, NO_LOGPROBS
    return draws


def wants_logprobs(draws: DrawArray) -> bool:
    """Return whether any of the draws (R,) wants log-probabilities."""
    return bool((draws["likely"] != NO_LOGPROBS).any())


def masked_draws(draws: DrawArray) -> npt.NDArray[np.intp]:
    """Return the indices of the draws (R,) that have a mask."""
    return np.flatnonzero(draws["mask"] != UNMASKED)


def pooled_rows(pools: PoolArray) -> IntArray:
    """The rows of a step's tokens that its pools have, in their order."""
    rows = [np.arange(row, row + count, dtype=np.int32) for row, count in pools[["row", "rows"]].tolist()]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)


def mask_words(vocab: int) -> int:
    """Words of 32 tokens that a mask has."""
    return -(-vocab // 32)


class Runner(Protocol):
    """Executes steps. Every method may raise RunnerError; after one, the runner is not used again."""

    kv_pages: int
    """Pages in the KV cache."""
    page_size: int
    """Tokens in an entry of page tables: in a page, where there is one kind of them."""
    page_kinds: tuple[PageKind, ...]
    """The kinds of its pages; (): one, whose pages hold `page_size` tokens, and all of which are seen."""
    vocab: int
    """Token ids are below this."""
    slots: int
    """Sequences that can be admitted at once."""
    max_draws: int
    """Tokens that a step may draw, or whose log-probability it may tell, and rows of its pools; at least one
    for each slot."""
    embeds: bool
    """False: it is handed no pools, as it cannot compute them."""
    predicts: bool
    """It guesses what follows each token that it draws (`Drawn.guesses`)."""
    prompt_grid: int
    """Pieces of a prompt end at multiples of so many positions, or with it; 1: anywhere, and no states."""
    snapshots: int
    """Copies of states that can be kept, numbered from 0."""
    arithmetic: Arithmetic
    """The name of what computes, and of the model: results may differ in their last bits where it differs."""
    depth: int
    """Launches that may be outstanding before the oldest is collected; 1 means none runs ahead."""

    def launch(self, batch: StepBatch) -> None:
        """Start a step; may return before it is done. Where any draw has a mask, `draw` has to follow."""
        ...

    def mask_room(self, count: int) -> IntArray:
        """Return an array of undefined contents for the newest launch's `count` masks, which `draw` reads."""
        ...

    def draw(self, masks: IntArray) -> None:
        """Let the newest launch draw, some of whose draws are masked; may return before they are drawn.

        masks  (M, mask_words(vocab)) int32: bit t % 32 of word t // 32 is set where token t is allowed. Where
               that leaves nothing that can be drawn, NOT_A_NUMBER is. May be changed once this has returned
        """
        ...

    def collect(self) -> Drawn | None:
        """Wait for the oldest uncollected launch and return what it drew; None where none is outstanding."""
        ...

    def close(self) -> None:
        """Release what the runner holds; safe to call twice."""
        ...
