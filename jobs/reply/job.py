"""Snapshots of rows: a job with its answers, and a worker."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from nightmill.jobs.base.contract import (
    Constrained,
    ConstraintKind,
    JobState,
    JsonObject,
    Markup,
    Rendering,
    StopReason,
    WorkerState,
)
from nightmill.jobs.base.hours import Hours
from nightmill.jobs.errors import EmbeddingError, RerankError, ScoreError
from nightmill.jobs.reply.embeddings import Embedding, numbers, relevance_of
from nightmill.jobs.reply.logprobs import Score, Scores, TokenLogprob, read, total
from nightmill.jobs.reply.parsing import Reply, ToolCall, read_reply
from nightmill.jobs.reply.token_ids import TokenIds
from nightmill.jobs.request.parameters import GenerationParams


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a job."""

    text: str
    stop_reason: StopReason
    completion_tokens: int
    seed: int  # a separate job with this seed has the same text
    packed_logprobs: bytes | None = field(default=None, repr=False)  # as in SQL; see `logprobs`
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)  # if requested

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of each token, if the job asked for them."""
        return None if self.packed_logprobs is None else read(self.packed_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A snapshot of a job's row: a prompt and its result."""

    id: str
    state: JobState
    prompt: str | None  # a plain prompt; or
    messages: list[JsonObject] | None  # a chat; or
    prompt_ids: list[int] | None = None  # a plain prompt as the model's token ids
    params: GenerationParams  # with its seed
    rendering: Rendering | None = None  # options for rendering the messages; None: defaults
    constrained: Constrained | None = None  # the constraint on the answer, if any
    markup: Markup | None = None  # markup of reasoning and tool calls in its texts, if any
    request: JsonObject | None = None  # parts of a request to /v1/responses that its answer repeats
    model: str | None = None  # None: any model
    batch: str | None = None
    custom_id: str | None = None
    row: int | None = None  # place in the batch's file, from 1
    stop_reason: StopReason | None = None
    text: str | None = None  # text of the first answer
    several: tuple[Answer, ...] = ()  # all answers, if several were requested; see `answers`
    packed_logprobs: bytes | None = field(default=None, repr=False)  # of a single answer; see `logprobs`
    packed_prompt_logprobs: bytes | None = field(default=None, repr=False)  # see `prompt_logprobs`
    packed_embedding: bytes | None = field(default=None, repr=False)  # as in SQL; see `embedding`
    token_ids: TokenIds | None = field(default=None, repr=False)  # see `prompt_token_ids`
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # of all answers together
    cached_tokens: int | None = None  # tokens of the prompt that the worker had computed before
    reasoning_tokens: int | None = None  # of all answers together
    gpu_seconds: float | None = None  # its share of the steps that computed it, in all its attempts
    energy_joules: float | None = None  # the same in joules; None if the device does not tell
    arithmetic: str | None = None  # what computed the text (`jobs.Arithmetic`); older rows have none
    prompt_digest: str | None = None  # of the prompt's token ids; older rows have none
    reuse: str | None = None  # which earlier answers may stand for its own (`jobs.request.reuse`)
    reused_from: str | None = None  # the job that its text was computed for, if another's
    reused_from_gone: bool = False  # that job has been deleted since
    prior: str | None = None  # the job that it follows, if any
    held: bool = False  # it waits for that one
    error: str | None = None
    errors: list[JsonObject] = field(default_factory=list)  # one entry per attempt that failed or was charged
    history: list[JsonObject] = field(default_factory=list)  # what it was before each change of parameters
    attempt: int = 0  # times claimed; the fencing token
    failures: int = 0  # attempts whose worker died while it ran this job alone
    max_attempts: int = 3  # failures after which the job is failed
    priority: int = 5
    worker: str | None = None
    owner: str | None = None  # name of the API key of the HTTP request
    request_id: str | None = None  # id of the HTTP request, if that had several prompts
    idempotency_key: str | None = None
    metadata: JsonObject = field(default_factory=dict)
    cancel_requested_at: datetime | None = None
    created_at: datetime
    scheduled_at: datetime | None = None
    deadline_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def seed(self) -> int | None:
        """The seed that reproduces this job's text on the same model and runner."""
        return self.params.seed

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers in order, once the job has ended; empty if it ended before it began to generate."""
        if self.several or self.text is None or self.stop_reason is None:
            return self.several
        count = 0 if self.completion_tokens is None else self.completion_tokens
        seed = 0 if self.seed is None else self.seed
        ids = self.token_ids.answers[0] if self.token_ids is not None and self.token_ids.answers else None
        return (Answer(self.text, self.stop_reason, count, seed, self.packed_logprobs, ids),)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of each token of the first answer, if requested; `answers` has those of the
        others."""
        return self.answers[0].logprobs if self.answers else None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of the prompt's tokens, if the job asked for them; the first one's is None."""
        return None if self.packed_prompt_logprobs is None else read(self.packed_prompt_logprobs)

    @property
    def embedding(self) -> Embedding | None:
        """The embedding of the text, if the job asked for one and succeeded."""
        if self.packed_embedding is None or not self.params.embed:
            return None
        return numbers(self.packed_embedding)

    @property
    def relevance(self) -> float | None:
        """The relevance of its document for its query, 0 to 1, if the job asked for that and succeeded."""
        if self.packed_embedding is None or self.params.rerank is None:
            return None
        return relevance_of(self.packed_embedding)

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """The token ids of the prompt, if the job asked for token ids; those of answers are in `answers`."""
        return None if self.token_ids is None else self.token_ids.prompt

    @property
    def scores(self) -> Scores | None:
        """The scores of the job's texts, in order; None unless it is a scoring job that succeeded."""
        if not self.params.score or self.state is not JobState.SUCCEEDED:
            return None
        texts = [(answer.text, answer.logprobs or ()) for answer in self.answers]
        return Scores(Score(text, total(tokens), tokens) for text, tokens in texts)

    @property
    def replies(self) -> tuple[Reply, ...]:
        """All answers parsed into content, reasoning and tool calls."""
        tools = None if self.rendering is None else self.rendering.tools
        return tuple(
            read_reply(answer.text, self.markup, tools, self.id, number)
            for number, answer in enumerate(self.answers)
        )

    @property
    def content(self) -> str | None:
        """The first answer without reasoning and tool calls."""
        return self.replies[0].content if self.answers else None

    @property
    def reasoning(self) -> str | None:
        """The reasoning before the first answer, if the model's template marks it."""
        return self.replies[0].reasoning if self.answers else None

    @property
    def reasoning_unfinished(self) -> bool:
        """True if the first answer was cut inside its reasoning, so that there is no answer proper."""
        return bool(self.answers) and self.stop_reason is not None and self.replies[0].unfinished

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first answer."""
        return self.replies[0].tool_calls if self.answers else ()

    @property
    def parsed(self) -> Any:
        """The value of an answer constrained to JSON; None without such a constraint, if the answer is
        incomplete, or if it consists of tool calls.

        An answer is complete, and obeys its schema, if `stop_reason` is eos.
        """
        return self.parsed_answers[0] if self.answers else None

    @property
    def parsed_answers(self) -> list[Any]:
        """The value of `parsed` for each answer."""
        asked = self.constrained
        if asked is None or asked.kind is not ConstraintKind.JSON_SCHEMA:
            return [None] * len(self.answers)
        return [
            json.loads(reply.content)
            if answer.stop_reason is StopReason.EOS and not reply.tool_calls
            else None
            for answer, reply in zip(self.answers, self.replies, strict=True)
        ]


def scores_of(job: Job) -> Scores:
    """Return the scores of an ended job; raises ScoreError if it has none."""
    if (scores := job.scores) is None:
        why = f": {job.error}" if job.error else ""
        raise ScoreError(f"job {job.id} ended without scores, {job.state} ({job.stop_reason}){why}")
    return scores


def relevance_in(job: Job) -> float:
    """Return the relevance of an ended job; raises RerankError if it has none."""
    if (relevance := job.relevance) is None:
        why = f": {job.error}" if job.error else ""
        raise RerankError(f"job {job.id} ended without a relevance, {job.state} ({job.stop_reason}){why}")
    return relevance


def embedding_of(job: Job) -> Embedding:
    """Return the embedding of an ended job; raises EmbeddingError if it has none."""
    if (embedding := job.embedding) is None:
        why = f": {job.error}" if job.error else ""
        raise EmbeddingError(f"job {job.id} ended without an embedding, {job.state} ({job.stop_reason}){why}")
    return embedding


IDLE = "idle, until there are jobs"
"""Why a worker sleeps that wakes for the next job; anything else does not end by a job."""
UNTIL = "until "
"""Beginning of why a worker sleeps that waits for its hours."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A snapshot of a worker's row: a generating process and its last heartbeat."""

    id: str
    host: str
    pid: int
    gpu: str | None
    model: str
    state: WorkerState
    started_at: datetime
    heartbeat_at: datetime
    detail: str | None  # current activity, for example while it loads
    stats: JsonObject | None = None  # statistics of its engine, as of the heartbeat
    paused: bool = False  # by hand: it sleeps, or is about to, until it is resumed
    models: list[str] | None = None  # that it loads in turn; `model` is the one that is loaded, or was last
    swap_for_interactive: bool = False  # it loads another of them when an interactive job asks for it
    together: str | None = None  # what it and the workers that share its GPU are called

    def could_serve(self, model: str) -> bool:
        """Return True if it loads the model in turn with others, whether or not it is loaded now."""
        return isinstance(self.models, list) and model in self.models

    @property
    def rests(self) -> bool:
        """True if it sleeps until its hours begin, or until it is resumed, whatever jobs there are."""
        return self.state is WorkerState.SLEEPING and (self.paused or (self.detail or "").startswith(UNTIL))

    @property
    def is_idle(self) -> bool:
        """True if it holds no job, as of its last heartbeat, or has no model loaded and chooses one."""
        between = self.state is WorkerState.SLEEPING and not self.rests
        return between or (self.stats or {}).get("in_flight") == 0

    @property
    def wakes_for_jobs(self) -> bool:
        """True if it sleeps only for want of jobs."""
        return self.state is WorkerState.SLEEPING and self.detail == IDLE

    @property
    def hours(self) -> Hours | None:
        """The times of day at which it serves; None: always, or unknown."""
        said = (self.stats or {}).get("hours")
        try:
            return Hours.parse(said) if isinstance(said, str) else None
        except ValueError:  # of a newer version
            return None

    def wakes_at(self, now: datetime) -> datetime | None:
        """Return when its hours begin, if it sleeps until then; None if it serves, or nobody knows."""
        if self.state is not WorkerState.SLEEPING or self.paused or self.hours is None:
            return None
        return None if self.hours.open_at(now) else self.hours.next_change(now)

    @property
    def note(self) -> str | None:
        """Current activity, or a remark on how it runs."""
        return self.detail or (self.stats or {}).get("note")

    @property
    def context_length(self) -> int | None:
        """Tokens that prompt and answer may have together; None before it has served."""
        value = (self.stats or {}).get("context")
        return value if type(value) is int else None

    @property
    def arithmetic(self) -> str | None:
        """The name of its arithmetic (`jobs.Arithmetic`); None before it has served."""
        return self._text("arithmetic")

    @property
    def model_file(self) -> str | None:
        """The path of its model file on its host; None before it has served."""
        return self._text("model_file")

    @property
    def tool_format(self) -> str:
        """The configured syntax of tool calls."""
        return self._text("tool_format") or "auto"

    def _text(self, name: str) -> str | None:
        value = (self.stats or {}).get(name)
        return value if isinstance(value, str) else None

    @property
    def has_served(self) -> bool:
        """True once it has accepted jobs, even if it has ended since."""
        # A lost worker with a detail was still loading.
        return self.state is not WorkerState.STARTING and not (self.state is WorkerState.LOST and self.detail)
