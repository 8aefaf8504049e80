"""Reads and tokenises every row of a file: what is bad, what the rest asks for, and a random sample of it."""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nightmill.jobs.base.contract import ConstraintKind, Prompt, Rendering
from nightmill.jobs.errors import NightmillError, RowCode
from nightmill.jobs.formats import InputFile, InputRow
from nightmill.jobs.request.parameters import MAX_SEED
from nightmill.jobs.request.spec import JobSpec
from nightmill.worker.commands.planning.rows import BadRow
from nightmill.worker.engine.limits import RequestLimits
from nightmill.worker.engine.request import Request


class PromptReader(Protocol):
    """The reading side of a model: tokens of prompts and texts, and faults of its template."""

    def encode(self, prompt: Prompt, rendering: Rendering | None = None) -> tuple[int, ...]:
        """A prompt's token ids, of a chat rendered so; raises NightmillError if it cannot be rendered."""
        ...

    def tokenize_texts(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each of these texts by itself, for behind a prompt; raises NightmillError."""
        ...

    def marks_in(self, prompt: Prompt) -> set[str]:
        """The model's special tokens that a plain prompt spells out, and that are read as characters."""
        ...

    def template_fault(self) -> str | None:
        """Which special tokens the chat template writes that stay out of reach, and what to do; or None."""
        ...


Tokens = tuple[int, ...]


@dataclass(slots=True)
class Survey:
    """The rows of a file. The arrays have one entry for each good row, in the order of the file."""

    rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("I"))
    answers: "array[int]" = field(default_factory=lambda: array("B"))
    """The number of answers that each row asks for."""
    limits: "array[int]" = field(default_factory=lambda: array("I"))
    """The most tokens that each answer can have: max_tokens, or what the context leaves."""
    endless: "array[int]" = field(default_factory=lambda: array("B"))
    """1 if nothing but the limit can end an answer (ignore_eos, nothing to stop at)."""
    cut: int = 0
    """Rows whose prompt and max_tokens together do not fit the context: such an answer may be cut."""
    models: Counter[str] = field(default_factory=Counter)
    """Numbers of rows, by the model that they name."""
    constrained: Counter[str] = field(default_factory=Counter)
    """Numbers of rows that constrain their answer, by the kind of constraint; `calls`: of tools."""
    tools: int = 0
    """Rows that name tools."""
    told: int = 0
    """Rows that ask for log-probabilities, or for the scores of texts."""
    marked: int = 0
    """Rows whose plain prompt spells out special tokens of the model."""
    marks: Counter[str] = field(default_factory=Counter)
    """The special tokens that plain prompts spell out, with the number of rows that have each."""
    sample: list[Request] = field(default_factory=list)
    """Good rows, drawn at random and in random order."""

    @property
    def good(self) -> int:
        """Rows that can be run."""
        return len(self.limits)

    @property
    def tokens_at_most(self) -> int:
        """Were every answer as long as it may be."""
        return sum(count * limit for count, limit in zip(self.answers, self.limits, strict=True))


def survey(
    file: InputFile,
    reader: PromptReader,
    limits: RequestLimits,
    *,
    defaults: JobSpec | None = None,
    sample: int = 0,
    on_row: Callable[[], None] = lambda: None,
) -> Survey:
    """Go through the whole file. `defaults` hold if a row says nothing.

    Keeps `sample` rows, the same ones for the same file. `on_row` is called after each row.
    """
    found = Survey()
    draw = random.Random(0)
    for row in file.rows(defaults or JobSpec()):
        found.rows += 1
        prompt_ids, scored, bad = _tokenise(row, reader)
        if bad is None and row.spec is not None:
            params = row.spec.params
            if (unknown := limits.unknown_id(prompt_ids, params)) is not None:
                bad = BadRow(row.number, row.custom_id, RowCode.INVALID_VALUE, *unknown)
            elif (fault := _fault(limits, prompt_ids, scored, row.spec)) is not None:
                bad = BadRow(row.number, row.custom_id, "over_context", *fault)
            else:
                _count(found, row.spec, prompt_ids, limits)
                _note_marks(found, reader, row.spec)
                _keep(found, Request(str(row.number), 1, prompt_ids, params, 0), sample, draw)
        if bad is not None:
            found.bad.append(bad)
        on_row()
    draw.shuffle(found.sample)
    return found


def _tokenise(row: InputRow, reader: PromptReader) -> tuple[Tokens, tuple[Tokens, ...], BadRow | None]:
    """The tokens of a row's prompt and of each text that it has scored, or why there are none."""
    if (bad := BadRow.of(row)) is not None:
        return (), (), bad
    spec = row.spec
    assert spec is not None and spec.prompt is not None
    name = "prompt" if spec.messages is None else "messages"
    most = spec.params.truncate_prompt_tokens or 0
    try:
        prompt_ids = reader.encode(spec.prompt, spec.rendering)[-most:]
        if spec.params.rerank is not None:  # read before its document
            name = "rerank"
            prompt_ids = (*reader.tokenize_texts((spec.params.rerank,))[0], *prompt_ids)
        name = "score"
        return prompt_ids, reader.tokenize_texts(spec.params.score) if spec.params.score else (), None
    except NightmillError as refused:
        name = "tools" if str(refused).startswith("tools: ") else name
        return (), (), BadRow(row.number, row.custom_id, "chat_template", name, str(refused))


def _fault(
    limits: RequestLimits, prompt_ids: Tokens, scored: tuple[Tokens, ...], spec: JobSpec
) -> tuple[str, str] | None:
    """Which field of a row is too long for the context, and the fault in words; None where all fits."""
    params = spec.params
    draws = not params.draws_nothing
    if (fault := limits.fault(prompt_ids, params, draws=draws)) is not None:
        return "prompt", fault
    longest = max(scored, key=len, default=())
    fault = limits.fault(prompt_ids + longest, params, draws=draws) if longest else None
    return None if fault is None else ("score", fault)


def _note_marks(found: Survey, reader: PromptReader, spec: JobSpec) -> None:
    if spec.prompt is not None and (marks := reader.marks_in(spec.prompt)):
        found.marked += 1
        found.marks.update(marks)


def _count(found: Survey, spec: JobSpec, prompt_ids: tuple[int, ...], limits: RequestLimits) -> None:
    params = spec.params
    room = limits.cache_context - len(prompt_ids)
    found.prompt_tokens.append(len(prompt_ids))
    found.answers.append(params.answers)
    found.limits.append(1 if params.draws_nothing else min(params.max_tokens, room))
    found.endless.append(params.ignore_eos and not (params.stop or params.stop_token_ids))
    found.cut += params.max_tokens > room and not (params.score or params.gives_numbers)
    found.told += params.logprobs is not None or bool(params.score) or params.prompt_logprobs is not None
    if spec.constrained is not None:
        found.constrained[str(spec.constrained.kind)] += 1
    if spec.tools is not None:
        found.tools += 1
        found.constrained[str(ConstraintKind.CALLS)] += spec.tools.required or spec.tools.strict
    if spec.model is not None:
        found.models[spec.model] += 1


def _keep(found: Survey, request: Request, size: int, draw: random.Random) -> None:
    """Reservoir sampling: each good row is kept with equal probability, whatever their number."""
    place = len(found.sample) if len(found.sample) < size else draw.randrange(found.good)
    if place >= size:
        return
    seed = draw.randrange(MAX_SEED) if request.params.seed is None else request.params.seed
    params = request.params
    if params.draws_nothing:
        said = {"max_tokens": 1, "score": (), "echo": False, "embed": False, "rerank": None}
        params = params.model_copy(update=said)
    draws = params is request.params
    kept = Request(request.job_id, request.attempt, request.prompt_ids, params, seed, scores=not draws)
    if place == len(found.sample):
        found.sample.append(kept)
    else:
        found.sample[place] = kept
