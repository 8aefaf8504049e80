"""A step as the scheduler plans it: which tokens of which sequences are computed."""

from dataclasses import dataclass, field

from nightmill.worker.engine.drafting import Draft
from nightmill.worker.engine.request import Sequence
from nightmill.worker.runners.base import NO_SNAPSHOT


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `length` known tokens of `sequence` from position `start`: of its prompt, then drawn ones.

    snapshot  the place that its states are copied to afterwards, if they are
    """

    sequence: Sequence
    start: int
    length: int
    snapshot: int = NO_SNAPSHOT

    @property
    def of_prompt(self) -> int:
        """The number of the chunk's tokens that belong to the prompt."""
        return min(max(0, self.sequence.prompt_length - self.start), self.length)

    @property
    def given(self) -> range:
        """The places of tokens that it is asked about, which follow on some that it computes."""
        return self.sequence.given(self.start, self.of_prompt)

    @property
    def pooled(self) -> range:
        """The places whose hidden states go into the embedding of its sequence."""
        return self.sequence.pooled(self.start, self.length)

    @property
    def rows_asked(self) -> int:
        """Rows that it is asked about or that are pooled, beside the one in which its sequence would draw."""
        return len(self.given) + max(0, len(self.pooled) - 1)

    @property
    def draws(self) -> bool:
        """True if the chunk ends with the last known token of its sequence, so that the next is drawn."""
        ends = self.start + self.length == len(self.sequence.tokens)
        return ends and self.sequence.request.embeds is None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to compute, who took a slot for it, who got further pages, and who lost some or all.

    decodes   sequences of which the token at `computed`, the one last drawn, is computed and the next drawn
    chunks    pieces of prompts, and drawn tokens where a sequence is computed again
    trimmed   sequences that have given pages back which no later token sees
    drafts    the last tokens of sequences, with guesses at the next ones, all of which are followed by draws
    guesses   further drafts may be made of what it draws
    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    admitted: list[Sequence]
    grown: list[Sequence]
    preempted: list[Sequence]
    drafts: list[Draft] = field(default_factory=list)
    trimmed: list[Sequence] = field(default_factory=list)
    guesses: bool = False

    @property
    def empty(self) -> bool:
        """True if there is nothing to do until a launch is collected."""
        return not self.decodes and not self.chunks and not self.drafts

    def touches(self, sequence: Sequence) -> bool:
        """Return whether any token of a sequence is computed."""
        return (
            sequence in self.decodes
            or any(chunk.sequence is sequence for chunk in self.chunks)
            or any(draft.sequence is sequence for draft in self.drafts)
        )


def next_chunk(sequence: Sequence, budget: int, spare: int, given: int, grid: int) -> Chunk:
    """Return the next chunk of a sequence that does not decode, within `budget` tokens; it may be empty.

    A step has room for a token or a piece of a prompt of each sequence that can run at once. A drawn token
    that is computed again takes as much: one where all run, more where `spare` are idle. A piece of the
    prompt is asked about no more than `given` tokens, or has as many rows that are pooled, and ends with the
    prompt or at a multiple of `grid`. It does not go beyond the next of the sequence's marks.
    """
    start = sequence.computed
    length = _on_grid(sequence, min(max(0, sequence.prompt_length - start), budget), grid)
    mark = min((mark for mark in sequence.marks if start < mark <= start + length), default=None)
    if mark is not None:
        length = mark - start
    elif start + length >= sequence.prompt_length:
        room = spare if length else spare + 1
        length += min(len(sequence.tokens) - start - length, budget - length, room)
    chunk = Chunk(sequence, start, length)
    if (surplus := len(chunk.given) - given) > 0:
        return Chunk(sequence, start, _on_grid(sequence, chunk.given.stop - 1 - surplus - start, grid))
    if (surplus := chunk.rows_asked - given) > 0:
        return Chunk(sequence, start, _on_grid(sequence, chunk.pooled.stop - surplus - start, grid))
    return chunk


def whole_prompt(sequence: Sequence, budget: int) -> Chunk:
    """Return the whole prompt of a sequence as a chunk.

    It is empty if `budget` has no room for it, or if a launch that is not collected yet computes it.
    """
    fits = not sequence.computed and sequence.prompt_length <= budget
    return Chunk(sequence, 0, sequence.prompt_length if fits else 0)


def _on_grid(sequence: Sequence, length: int, grid: int) -> int:
    """The length of a piece of the prompt, less what it goes beyond a multiple of `grid`."""
    end = sequence.computed + length
    return length if end >= sequence.prompt_length else max(0, length - end % grid)
