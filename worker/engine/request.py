"""Requests to the engine, its completions and partials, and its state of a request in between."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from nightmill.jobs.base.contract import Constrained, Markup, StopReason
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.flat import flat
from nightmill.worker.engine.logprobs import Logprobs, likely_of, of_nothing, record_bytes
from nightmill.worker.engine.ngrams import Guesses
from nightmill.worker.engine.page_tables import KindTable, held_pages
from nightmill.worker.engine.prefix_tree import PrefixNode
from nightmill.worker.engine.stops import TextWatch
from nightmill.worker.runners.base import NO_LOGPROBS, NO_SNAPSHOT


@flat
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
    `prompt_logprobs_from`: the prompt's tokens from that place on get log-probabilities, too; the first
    of all has none.
    `echo`: what its text begins with, before what is drawn. `scores`: its prompt ends with a text to score,
    so only what is told of that matters; what is drawn after it is no text. `markup`: the marks of thoughts,
    which are not part of the answer. `closing`: what is drawn once thoughts have had all tokens that
    `max_reasoning_tokens` allows. `embeds`: nothing is drawn; the hidden states at these places of its
    prompt, which follow each other, become its embedding. `second`: the place in the prompt at which the
    second text of a pair begins; what is embedded then becomes its relevance.
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
    prompt_logprobs_from: int | None = None
    echo: str = ""
    scores: bool = False
    markup: Markup | None = None
    closing: "ClosingTokens | None" = None
    embeds: range | None = None
    second: int | None = None

    @property
    def draws(self) -> bool:
        """True if its prompt is followed by an answer."""
        return not self.scores and self.embeds is None

    @property
    def drawn_freely(self) -> bool:
        """True if no penalty or ban looks at the tokens that were drawn before."""
        params = self.params
        return params.repetition_penalty == 1.0 and not (
            params.presence_penalty or params.frequency_penalty or params.logit_bias or self.banned
        )

    @property
    def thinking(self) -> tuple[str, str, bool] | None:
        """The marks of thoughts and whether they are opened, if what is asked of the answer needs to know."""
        if self.markup is None or self.markup.thinking is None:
            return None
        if not (self.params.stop or self.params.min_tokens or self.banned or self.closing):
            return None
        return (*self.markup.thinking, self.markup.opened)


class ClosingTokens(NamedTuple):
    """The tokens that close thoughts: `inside` them, or `before` anything is drawn."""

    inside: tuple[int, ...]
    before: tuple[int, ...]


@flat
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
    logprobs: Logprobs | None = None  # log-probabilities, if it asked for them
    embedding: bytes | None = None  # float32, if it asked for one
    cached_tokens: int = field(default=0, compare=False)
    """Tokens of the prompt that were not computed, since their pages were there; the text is the same."""
    gpu_seconds: float = field(default=0.0, compare=False)
    """Its share of the time of the steps that computed it."""
    energy_joules: float | None = field(default=None, compare=False)
    """Its share of their energy; None if the device does not tell."""


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens that were drawn so far for an unfinished request, and what it cost, if it is dropped."""

    job_id: str
    attempt: int
    token_ids: tuple[int, ...]
    gpu_seconds: float = field(default=0.0, compare=False)
    energy_joules: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Partial:
    """An unfinished request's tokens and text so far.

    The text may still lose an end that begins a stop string.
    """

    job_id: str
    attempt: int
    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    gpu_seconds: float = field(default=0.0, compare=False)
    energy_joules: float | None = field(default=None, compare=False)


class Delta(NamedTuple):
    """A piece that a followed request's text has grown by: `text` goes at character `start` of it.

    logprobs  if they were asked for, those of all tokens since the last delta, some of which may belong to
              text that is not sent yet
    counts    tokens of the prompt, and those that were drawn so far
    """

    job_id: str
    attempt: int
    start: int
    text: str
    logprobs: Logprobs | None = None
    counts: tuple[int, int] | None = None


class SequenceState(Enum):
    """The state of a sequence in the engine."""

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
    tables: list[KindTable] = field(default_factory=list)  # its pages, of each kind; empty without a slot
    room: int = 0  # tokens that its pages of all kinds hold
    slot: int | None = None
    last_launch: int = 0  # the number of the newest launch that touches this sequence
    reported: int = 0  # drawn tokens that were last reported as progress
    watch: TextWatch | None = None  # only where there are stop strings, or thoughts to tell from the answer
    ends: frozenset[int] = frozenset()  # tokens that end the text; not drawn before `min_tokens` others

    # What `PrefixSharing` knows of it.
    cached: int | None = None  # tokens of its prompt that were there when it was first admitted
    has_shared_pages: bool = False  # computed by others, or by itself before it was preempted
    unshared: bool = False  # it shares no pages any more: what it had of others may not have been numbers
    node: PrefixNode | None = None  # its last segment that others can find; None: none, nothing is shared
    findable: int = 0  # its segments up to there
    page_keys: list[bytes] | None = None  # while it waits or computes segments that others may want
    promise: tuple[PrefixNode, bytes] | None = None  # where in the tree the segment is that it computes next
    follows: "tuple[Sequence, int] | None" = None  # waits until that one has computed so many segments

    # What `Drafter` knows of it.
    guesses: Guesses | None = None
    asked: tuple[int, tuple[int, ...]] = (0, ())  # its tokens when a model was asked, and what that guessed
    holds: bool = False  # it waits for its last token, since more may be guessed
    unsettled: bool = False  # its slot may not have its last token: a draft was drawn behind it

    copy: int = NO_SNAPSHOT  # the place for a copy of its states
    copied: int = 0  # tokens that the copy has gone through
    stale: bool = False  # its states went through wrong guesses: the copy is what it goes on from

    snapshot: int = NO_SNAPSHOT  # the place of the states that it goes on from, if it has_shared_pages any
    marks: set[int] = field(default_factory=set)  # tokens of its prompt after which its states are copied

    records: bytearray = field(default_factory=bytearray)  # of `Logprobs`, as far as they are known
    seconds: float = 0.0  # its share of the steps that computed it
    joules: float = 0.0
    prompt_logprobs_until: int = 0
    """The tokens of its prompt before this place are asked about by a launch, or never."""

    likely: int = field(init=False)
    """`DRAW.likely` of its draws."""
    constraint: object | None = field(init=False)
    reach: int = field(init=False)
    """No launch computes more than so many tokens of it, until this is raised."""
    masked_from: int = field(init=False)
    masked_until: int = field(init=False)
    """The tokens at places from the one to before the other are drawn under a mask."""
    budget: int | None = field(init=False)
    """Most tokens of its thoughts; None: there is no limit, or they are over."""
    forced: tuple[int, ...] = ()
    """The tokens that are drawn next, whatever their likelihoods."""
    prompt_length: int = field(init=False)
    rank: tuple[int, int, int] = field(init=False)
    """Sorts sequences by who goes first: higher priority, then the earlier group, then submission."""

    def __post_init__(self) -> None:
        self.constraint = self.request.constraint
        self.likely = likely_of(self.request.params.logprobs, self.request.prompt_logprobs_from)
        if self.request.prompt_logprobs_from == 0:
            self.records += of_nothing(self.likely)
        self.prompt_length = len(self.request.prompt_ids)
        self.ask_again()
        fewest = self.request.params.min_tokens if self.ends else 0
        self.masked_until = self.prompt_length + fewest if fewest else 0
        thinks = self.request.thinking is not None
        if self.constraint is not None or (thinks and (fewest or self.request.banned)):
            self.masked_until = self.length_limit
        self.masked_from = 0
        self.budget = None if self.request.closing is None else self.request.params.max_reasoning_tokens
        if self.budget is not None:
            if not self.masked_until:
                self.masked_from = self.prompt_length + self.budget
            self.masked_until = self.length_limit
            if self.budget == 0:
                self.forced = self.closing_tokens
        self.let_run()
        group = self.order if self.group is None else self.group
        self.rank = (-self.request.priority, group + self.request.behind, self.order)

    @property
    def may_be_guessed(self) -> bool:
        """True if several of its tokens may be drawn at once: neither penalties nor thoughts look at them."""
        return self.request.drawn_freely and not (self.masked_until and self.request.thinking is not None)

    def let_run(self) -> None:
        """One whose next token is drawn under a mask is computed up to that one; others run ahead.

        One that holds is computed up to the last token that is known.
        """
        length, last = len(self.tokens), self.length_limit - 1
        if self.holds:
            self.reach = max(min(length, last), self.computed)
            return
        self.reach = min(max(length + 1, self.masked_from - 1), last) if length < self.masked_until else last

    @property
    def closing_tokens(self) -> tuple[int, ...]:
        """The tokens that close thoughts where they have begun, or where nothing is drawn yet."""
        closing, markup = self.request.closing, self.request.markup
        if closing is None or markup is None:
            return ()
        return closing.before if not self.generated and not markup.opened else closing.inside

    def follow_budget(self) -> bool:
        """Look at the token that was added last; true if this ends what the budget had to say.

        Thoughts that have had all their tokens are closed, token by token, where they can be closed: not in
        the header of a message, nor before they begin. What is forced is a function of the tokens before.
        """
        assert self.budget is not None and self.watch is not None
        was_forced, self.forced = bool(self.forced), self.forced[1:]
        if not was_forced and self.generated >= self.budget and self.watch.closable:
            self.forced = self.closing_tokens
        over = not self.forced and (was_forced or self.watch.answer_from is not None)
        if over:
            self.budget = None
            if self.masked_from:
                # A launch that draws the next token under a mask may be under way: it always does.
                until = len(self.tokens) + 1
                self.masked_until = until if until > self.masked_from else 0
        self.let_run()
        return over

    def ask_again(self) -> None:
        """Ask once more about the tokens of the prompt whose log-probabilities are not known.

        What launches may have been asked about them counts for nothing.
        """
        first = self.request.prompt_logprobs_from
        self.prompt_logprobs_until = self.prompt_length
        if first is not None:
            known = len(self.records) // record_bytes(self.likely)
            self.prompt_logprobs_until = min(first + known, self.prompt_length)

    def pooled(self, start: int, length: int) -> range:
        """The places whose hidden states go into its embedding, where these of its prompt are computed."""
        embeds = self.request.embeds
        if embeds is None:
            return range(start, start)
        first = max(start, embeds.start)
        return range(first, max(first, min(start + length, embeds.stop)))

    @property
    def sharable(self) -> int:
        """Tokens of its prompt that others may have computed: of what follows, it is told something."""
        known = self.prompt_length
        if self.prompt_logprobs_until < self.prompt_length:
            known = self.prompt_logprobs_until - 1
        return known if self.request.embeds is None else min(known, self.request.embeds.start)

    def given(self, start: int, length: int) -> range:
        """The places of tokens that are asked about where these places of its prompt are computed."""
        return range(max(start + 1, self.prompt_logprobs_until), min(start + length + 1, self.prompt_length))

    @property
    def logprobs(self) -> Logprobs | None:
        """Its log-probabilities so far; None if it did not ask."""
        return self.logprobs_after(0)

    def logprobs_after(self, known: int) -> Logprobs | None:
        """Its log-probabilities so far, without the first `known` tokens; None if it did not ask."""
        if self.likely == NO_LOGPROBS:
            return None
        size = record_bytes(self.likely)
        first = self.request.prompt_logprobs_from
        if first is None:
            first = self.prompt_length
        begin, end = first + known, first + len(self.records) // size
        given = max(0, min(end, self.prompt_length) - begin)
        return Logprobs(
            tuple(self.tokens[begin:end]), given, self.likely, bytes(self.records[known * size :])
        )

    def must_go_on(self, ahead: int = 0) -> bool:
        """Return whether no token may end it; `ahead`: once it has so many tokens more."""
        fewest = self.request.params.min_tokens
        before = 0 if self.watch is None else self.watch.answer_from
        return fewest > 0 and (before is None or self.generated + ahead - before < fewest)

    @property
    def answer(self) -> list[int] | None:
        """The tokens of the answer so far; None while its thoughts are not over."""
        before = 0 if self.watch is None else self.watch.answer_from
        return None if before is None else self.tokens[self.prompt_length + before :]

    @property
    def banned_here(self) -> tuple[tuple[int, ...], ...]:
        """Runs of tokens that masks keep from the answer: runners would keep them from thoughts, too."""
        return self.request.banned if self.request.thinking is not None and self.answer is not None else ()

    @property
    def held_pages(self) -> int:
        """Pages that it has, of all kinds."""
        return held_pages(self.tables)

    @property
    def generated(self) -> int:
        """Tokens drawn that the host has seen."""
        return len(self.tokens) - self.prompt_length

    @property
    def drawing(self) -> int:
        """Tokens drawn by outstanding launches."""
        return max(0, self.computed + 1 - len(self.tokens)) if self.decoding else 0
