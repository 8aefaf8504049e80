"""Snapshots of rows: a job with its answers, and a worker."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from nightmill.jobs.contract import (
    Constrained,
    ConstraintKind,
    JobState,
    JsonObject,
    Markup,
    Rendering,
    StopReason,
    WorkerState,
)
from nightmill.jobs.errors import ScoreError
from nightmill.jobs.logprobs import Score, Scores, TokenLogprob, read, total
from nightmill.jobs.parameters import GenerationParams
from nightmill.jobs.reading import Reply, ToolCall, read_reply


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers of a job."""

    text: str
    stop_reason: StopReason
    completion_tokens: int
    seed: int  # a job of its own with this seed has the same text
    told: bytes | None = field(default=None, repr=False)  # its log-probabilities as its row keeps them

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Of each of its tokens, if the job asked for them."""
        return None if self.told is None else read(self.told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt and what became of it: a snapshot of its row."""

    id: str
    state: JobState
    prompt: str | None  # a plain prompt, or
    messages: list[JsonObject] | None  # a chat, or
    prompt_ids: list[int] | None = None  # a plain prompt as the model's token ids
    params: GenerationParams  # with its seed
    rendering: Rendering | None = None  # how the messages become a prompt; None: as usual
    constrained: Constrained | None = None  # what the answer must be; None: anything
    markup: Markup | None = None  # what its texts hold beside the answer; None: nothing
    model: str | None = None  # None: whatever model the worker serves
    batch: str | None = None
    custom_id: str | None = None
    row: int | None = None  # place in the batch's file, from 1
    stop_reason: StopReason | None = None
    text: str | None = None  # of the first answer
    several: tuple[Answer, ...] = ()  # all answers in order, where more than one was asked for: see `answers`
    told: bytes | None = field(default=None, repr=False)  # as of an answer, of its only one: see `logprobs`
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # of all answers together
    arithmetic: str | None = None  # that computed the text (`jobs.arithmetic`); older rows have none
    prompt_digest: str | None = None  # of the prompt's token ids; older rows have none
    error: str | None = None
    errors: list[JsonObject] = field(default_factory=list)  # one entry per attempt that failed or was charged
    attempt: int = 0  # times claimed; the fencing token
    failures: int = 0  # attempts that died with this job alone in its worker; others are nobody's
    max_attempts: int = 3  # so many of them, and the job is failed
    priority: int = 5
    worker: str | None = None
    owner: str | None = None  # the name of the key that it came with over HTTP
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
        """The seed that repeats this job's text on the same model and runner."""
        return self.params.seed

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Its answers in order, once it has ended. One that had not begun to write has none."""
        if self.several or self.text is None or self.stop_reason is None:
            return self.several
        count = 0 if self.completion_tokens is None else self.completion_tokens
        seed = 0 if self.seed is None else self.seed
        return (Answer(self.text, self.stop_reason, count, seed, self.told),)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Of each token of the first answer, if they were asked for; others' are those of `answers`."""
        return self.answers[0].logprobs if self.answers else None

    @property
    def scores(self) -> Scores | None:
        """How likely each of the texts is that it was to score, in their order; None if it had none to."""
        if not self.params.score or self.state is not JobState.SUCCEEDED:
            return None
        told = [(answer.text, answer.logprobs or ()) for answer in self.answers]
        return Scores(Score(text, total(tokens), tokens) for text, tokens in told)

    @property
    def replies(self) -> tuple[Reply, ...]:
        """Its answers, read: what the model thought, said, and wants called."""
        tools = None if self.rendering is None else self.rendering.tools
        return tuple(
            read_reply(answer.text, self.markup, tools, self.id, number)
            for number, answer in enumerate(self.answers)
        )

    @property
    def content(self) -> str | None:
        """What the first answer says: its text without thoughts and calls."""
        return self.replies[0].content if self.answers else None

    @property
    def reasoning(self) -> str | None:
        """What the model thought before its first answer, if its template marks that."""
        return self.replies[0].reasoning if self.answers else None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The functions that the first answer wants called."""
        return self.replies[0].tool_calls if self.answers else ()

    @property
    def parsed(self) -> Any:
        """The value of an answer that had to be JSON. None if it had not, or is not whole.

        It is whole if it ended by itself (`stop_reason` is eos): then it obeys its schema.
        """
        return self.parsed_answers[0] if self.answers else None

    @property
    def parsed_answers(self) -> list[Any]:
        """As `parsed`, of each answer."""
        asked = self.constrained
        if asked is None or asked.kind is not ConstraintKind.JSON_SCHEMA:
            return [None] * len(self.answers)
        return [
            json.loads(answer.text) if answer.stop_reason is StopReason.EOS else None
            for answer in self.answers
        ]


def scores_of(job: Job) -> Scores:
    """The scores of a job that has ended; raises ScoreError if it has none."""
    if (scores := job.scores) is None:
        why = f": {job.error}" if job.error else ""
        raise ScoreError(f"job {job.id} ended without scores, {job.state} ({job.stop_reason}){why}")
    return scores


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that generates, and its last sign of life: a snapshot of its row."""

    id: str
    host: str
    pid: int
    gpu: str | None
    model: str
    state: WorkerState
    started_at: datetime
    heartbeat_at: datetime
    detail: str | None  # what it is doing, as while it loads
    stats: JsonObject | None = None  # what its engine has done, and how full it is, as of the heartbeat

    @property
    def note(self) -> str | None:
        """What it is doing, or what people should know of how it runs."""
        return self.detail or (self.stats or {}).get("note")

    @property
    def has_served(self) -> bool:
        """True once it takes jobs, also if it has ended since."""
        # One that is lost had not come to serve if it says what it was loading.
        return self.state is not WorkerState.STARTING and not (self.state is WorkerState.LOST and self.detail)
