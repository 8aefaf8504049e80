"""A step as the scheduler plans it: which tokens of which sequences are computed."""

from dataclasses import dataclass

from nightmill.worker.engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `length` known tokens of `sequence` from position `start`: of its prompt, then drawn ones."""

    sequence: Sequence
    start: int
    length: int

    @property
    def of_prompt(self) -> int:
        """How many of them are of the prompt."""
        return min(max(0, self.sequence.prompt_length - self.start), self.length)

    @property
    def given(self) -> range:
        """The places of tokens that it is asked about, which follow on some that it computes."""
        return self.sequence.given(self.start, self.of_prompt)

    @property
    def draws(self) -> bool:
        """Whether its last token is the last one known, so that the next is drawn."""
        return self.start + self.length == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to compute, who took a slot for it, who got further pages, and who lost theirs.

    decodes   sequences of which the token at `computed`, the one last drawn, is computed and the next drawn
    chunks    pieces of prompts, and drawn tokens where a sequence is computed again
    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    admitted: list[Sequence]
    grown: list[Sequence]
    preempted: list[Sequence]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do until a launch is collected."""
        return not self.decodes and not self.chunks
