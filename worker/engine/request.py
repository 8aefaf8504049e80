"""What goes into the engine, what comes out of it, and what the engine knows of a request in between."""

from dataclasses import dataclass, field
from enum import Enum

from jobs.contract import GenerationParams, StopReason
from worker.engine.stops import TextWatch


@dataclass(frozen=True, slots=True)
class Request:
    """One claimed job, tokenised. `deadline` is in seconds since the epoch; `seed` keys the sampler.

    `priority`: higher is admitted sooner; equal priorities in order of submission.
    """

    job_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    params: GenerationParams
    seed: int
    deadline: float | None = None
    priority: int = 5


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. A request that ended early keeps the tokens and the text that it had.

    `completion_tokens` counts every token that was drawn for it, the end-of-text token included: it is
    what the answer cost. `text` holds neither the end-of-text token nor a stop string.
    """

    job_id: str
    attempt: int
    token_ids: tuple[int, ...]
    text: str
    stop_reason: StopReason
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """What an unfinished request has so far. Its text may still lose an end that begins a stop string."""

    job_id: str
    attempt: int
    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int


class SequenceState(Enum):
    """Where a sequence stands in the engine."""

    WAITING = "waiting"  # for a slot and pages; also after preemption
    RUNNING = "running"  # has a slot and pages
    FINISHED = "finished"  # its completion is made


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine: its tokens, and how far the launches have got with them.

    The host may be behind the runner: `drawing` tokens have been asked for that it has not seen. Pages and
    slot outlive the RUNNING state until `in_flight` is 0, for outstanding launches still write there.
    """

    request: Request
    order: int  # of submission; unique
    tokens: list[int]  # the prompt, then every token drawn
    length_limit: int  # the sequence never holds more tokens than this
    state: SequenceState = SequenceState.WAITING
    computed: int = 0  # tokens whose keys and values are in the cache once the launches are done
    block_table: list[int] = field(default_factory=list)
    slot: int | None = None
    in_flight: int = 0  # launches outstanding that touch this sequence
    drawing: int = 0  # draws among them
    watch: TextWatch | None = None  # only where there are stop strings
    stop_reason: StopReason | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens in the prompt."""
        return len(self.request.prompt_ids)

    @property
    def generated(self) -> int:
        """Tokens drawn that the host has seen."""
        return len(self.tokens) - self.prompt_length

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts sequences by who goes first: higher priority, then earlier submission."""
        return (-self.request.priority, self.order)

    @property
    def pending(self) -> int:
        """Tokens to compute before the next draw; 0 where the last token it may have is already asked for."""
        length = len(self.tokens) + self.drawing
        return length - self.computed if length < self.length_limit else 0
