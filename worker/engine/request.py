"""What goes into the engine, what comes out of it, and what the engine knows of a request in between."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from nightmill.jobs.contract import Constrained, StopReason
from nightmill.jobs.parameters import GenerationParams
from nightmill.worker.engine.prefix_tree import PrefixNode
from nightmill.worker.engine.stops import TextWatch
from nightmill.worker.engine.told import Told, likely_of, of_nothing, record_bytes
from nightmill.worker.runners.base import UNTOLD


@dataclass(frozen=True, slots=True)
class Request:
    """One claimed job, tokenised, or one of its answers. `seed` keys the sampler.

    `job_id` names the request: each answer of a job has a name of its own. `deadline` is in seconds since the
    epoch. `priority`: higher is admitted sooner; equal priorities in order of submission, but for equal
    prefixes, which are kept together, and for one that is `behind`: it goes as if so many more had been
    submitted before it. `generated_ids`: what an earlier attempt had drawn, to go on from. `constrained`:
    what the answer must be, of which whoever submits makes the `constraint`: what may be drawn, as it stands
    before the first of `generated_ids`. It is this request's alone, and of the kind that the engine's
    constraints take. `banned`: runs of tokens that the answer must not hold. `interactive`: somebody waits
    for it, so it may have slots that are kept for such requests, and steps are short while it is there.
    `told_from`: the prompt's tokens from that place on are told their log-probabilities, too; the first of
    all has none.
    `echo`: what its text begins with, before what is drawn. `scores`: its prompt ends with a text to score,
    so only what is told of that matters; what is drawn after it is no text.
    """

    job_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    params: GenerationParams
    seed: int
    deadline: float | None = None
    priority: int = 5
    generated_ids: tuple[int, ...] = ()
    constraint: object | None = None
    constrained: Constrained | None = None
    behind: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    interactive: bool = False
    told_from: int | None = None
    echo: str = ""
    scores: bool = False


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
    echoed: int = 0  # characters of the text that are its `Request.echo`
    told: Told | None = None  # log-probabilities, if it asked for them


@dataclass(frozen=True, slots=True)
class Progress:
    """The tokens that were drawn so far for an unfinished request."""

    job_id: str
    attempt: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Partial:
    """What an unfinished request has so far. Its text may still lose an end that begins a stop string."""

    job_id: str
    attempt: int
    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int


class Growth(NamedTuple):
    """What a followed request's text has grown by: `text` goes at character `start` of it.

    told  if log-probabilities were asked for, those of all tokens since the last growth, some of which may
          belong to text that is not told yet
    """

    job_id: str
    attempt: int
    start: int
    text: str
    told: Told | None = None


class SequenceState(Enum):
    """Where a sequence stands in the engine."""

    WAITING = "waiting"  # for a slot and pages; also after preemption
    RUNNING = "running"  # has a slot and pages
    FINISHED = "finished"  # its completion is made


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine: its tokens, and how far the launches have got with them.

    The host may be behind the runner: where `computed` is beyond the tokens that it knows, it has not seen
    some that were drawn. How far it may be behind is each sequence's own affair (`reach`): one that draws
    under a mask is computed up to one unknown token, others run ahead. Pages and slot outlive the RUNNING
    state until `last_launch` is collected, for outstanding launches still write there.
    """

    request: Request
    order: int  # of submission; unique
    tokens: list[int]  # the prompt, then every token drawn
    length_limit: int  # the sequence never holds more tokens than this
    group: int | None = None  # the order of the request whose place in the queue it shares
    state: SequenceState = SequenceState.WAITING
    computed: int = 0  # tokens whose keys and values are in the cache once the launches are done
    decoding: bool = False  # each launch from here on computes one token and draws the next
    block_table: list[int] = field(default_factory=list)
    room: int = 0  # tokens that its pages hold
    slot: int | None = None
    last_launch: int = 0  # the number of the newest launch that touches this sequence
    reported: int = 0  # drawn tokens that were last reported as progress
    watch: TextWatch | None = None  # only where there are stop strings
    ends: frozenset[int] = frozenset()  # tokens that end the text; not drawn before `min_tokens` others

    # What `PrefixSharing` knows of it.
    borrowed: bool = False  # it has pages that others computed, or it did itself before it was preempted
    alone: bool = False  # it shares no pages any more: what it had of others may not have been numbers
    node: PrefixNode | None = None  # its last page that others can find; None: none, or nothing is shared
    findable: int = 0  # its pages up to there
    page_keys: list[bytes] | None = None  # while it waits or computes pages that others may want
    promise: tuple[PrefixNode, bytes] | None = None  # where in the tree the page is that it computes next
    follows: "tuple[Sequence, int] | None" = None  # waits until that one has computed so many pages

    records: bytearray = field(default_factory=bytearray)  # of `Told`, as far as they are known
    told_until: int = 0  # the tokens of its prompt before this place are asked about by a launch, or never

    likely: int = field(init=False)
    """`DRAW.likely` of its draws."""
    constraint: object | None = field(init=False)
    reach: int = field(init=False)
    """No launch computes more than so many tokens of it, until this is raised."""
    masked_until: int = field(init=False)
    """The tokens at places before this one are drawn under a mask; 0: none is."""
    prompt_length: int = field(init=False)
    rank: tuple[int, int, int] = field(init=False)
    """Sorts sequences by who goes first: higher priority, then the earlier group, then submission."""

    def __post_init__(self) -> None:
        self.constraint = self.request.constraint
        self.likely = likely_of(self.request.params.logprobs, self.request.told_from)
        if self.request.told_from == 0:
            self.records += of_nothing(self.likely)
        self.prompt_length = len(self.request.prompt_ids)
        self.ask_again()
        fewest = self.request.params.min_tokens if self.ends else 0
        self.masked_until = self.prompt_length + fewest if fewest else 0
        if self.constraint is not None:
            self.masked_until = self.length_limit
        self.let_run()
        group = self.order if self.group is None else self.group
        self.rank = (-self.request.priority, group + self.request.behind, self.order)

    def let_run(self) -> None:
        """One whose next token is drawn under a mask is computed up to that one; others run ahead."""
        length, last = len(self.tokens), self.length_limit - 1
        self.reach = min(length + 1, last) if length < self.masked_until else last

    def ask_again(self) -> None:
        """What launches may have been asked about its prompt counts for nothing, unless it is known."""
        first = self.request.told_from
        self.told_until = self.prompt_length
        if first is not None:
            known = len(self.records) // record_bytes(self.likely)
            self.told_until = min(first + known, self.prompt_length)

    def given(self, start: int, length: int) -> range:
        """The places of tokens that are asked about where these places of its prompt are computed."""
        return range(max(start + 1, self.told_until), min(start + length + 1, self.prompt_length))

    @property
    def told(self) -> Told | None:
        """What it has been told so far; None if it did not ask."""
        return self.told_after(0)

    def told_after(self, known: int) -> Told | None:
        """What it has been told so far, but for the first `known` tokens; None if it did not ask."""
        if self.likely == UNTOLD:
            return None
        size = record_bytes(self.likely)
        first = self.prompt_length if self.request.told_from is None else self.request.told_from
        begin, end = first + known, first + len(self.records) // size
        given = max(0, min(end, self.prompt_length) - begin)
        return Told(tuple(self.tokens[begin:end]), given, self.likely, bytes(self.records[known * size :]))

    @property
    def must_go_on(self) -> bool:
        """True while no token may end it."""
        return self.generated < self.request.params.min_tokens

    @property
    def generated(self) -> int:
        """Tokens drawn that the host has seen."""
        return len(self.tokens) - self.prompt_length

    @property
    def drawing(self) -> int:
        """Tokens drawn by outstanding launches."""
        return max(0, self.computed + 1 - len(self.tokens)) if self.decoding else 0
