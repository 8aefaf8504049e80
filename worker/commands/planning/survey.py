"""Reads and tokenises every row of a file: what is bad, what the rest asks for, and a random sample of it."""

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from nightmill.jobs.contract import ConstraintKind, Prompt, Rendering
from nightmill.jobs.errors import NightmillError, RowCode
from nightmill.jobs.formats import InputFile, InputRow
from nightmill.jobs.parameters import MAX_SEED
from nightmill.jobs.spec import JobSpec
from nightmill.worker.engine.limits import Limits
from nightmill.worker.engine.request import Request

Encode = Callable[[Prompt, Rendering | None], tuple[int, ...]]
"""A prompt's token ids, if it is a chat rendered so; raises NightmillError if it cannot be rendered."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be run."""

    line: int
    custom_id: str | None
    code: str
    field: str | None
    message: str


@dataclass(slots=True)
class Survey:
    """The rows of a file. The arrays have one entry for each good row, in the order of the file."""

    rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("I"))
    answers: "array[int]" = field(default_factory=lambda: array("B"))
    """How many answers the row is to have."""
    limits: "array[int]" = field(default_factory=lambda: array("I"))
    """The most tokens that each answer can have: max_tokens, or what the context leaves."""
    endless: "array[int]" = field(default_factory=lambda: array("B"))
    """1 if nothing but the limit can end an answer (ignore_eos, nothing to stop at)."""
    cut: int = 0
    """Rows whose prompt and max_tokens together do not fit the context: such an answer may be cut."""
    models: Counter[str] = field(default_factory=Counter)
    """How many rows ask for which model by name."""
    constrained: Counter[str] = field(default_factory=Counter)
    """How many rows say what their answer must be, by the kind of it; `calls`: of tools."""
    tools: int = 0
    """Rows that name tools."""
    told: int = 0
    """Rows that ask for log-probabilities, or for the scores of texts."""
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
    encode: Encode,
    limits: Limits,
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
        prompt_ids, bad = _tokenise(row, encode)
        if bad is None and row.spec is not None:
            params = row.spec.params
            if (unknown := limits.unknown_id(prompt_ids, params)) is not None:
                bad = BadRow(row.number, row.custom_id, RowCode.INVALID_VALUE, *unknown)
            elif (fault := limits.fault(prompt_ids, params)) is not None:
                bad = BadRow(row.number, row.custom_id, "over_context", "prompt", fault)
            else:
                _count(found, row.spec, prompt_ids, limits)
                _keep(found, Request(str(row.number), 1, prompt_ids, params, 0), sample, draw)
        if bad is not None:
            found.bad.append(bad)
        on_row()
    draw.shuffle(found.sample)
    return found


def _tokenise(row: InputRow, encode: Encode) -> tuple[tuple[int, ...], BadRow | None]:
    if row.error is not None:
        error = row.error
        return (), BadRow(row.number, row.custom_id, error.code, error.field, error.message)
    spec = row.spec
    assert spec is not None and spec.prompt is not None
    try:
        return encode(spec.prompt, spec.rendering), None
    except NightmillError as refused:
        name = "prompt" if spec.messages is None else "messages"
        name = "tools" if str(refused).startswith("tools: ") else name
        return (), BadRow(row.number, row.custom_id, "chat_template", name, str(refused))


def _count(found: Survey, spec: JobSpec, prompt_ids: tuple[int, ...], limits: Limits) -> None:
    params = spec.params
    room = limits.cache_context - len(prompt_ids)
    found.prompt_tokens.append(len(prompt_ids))
    found.answers.append(params.answers)
    found.limits.append(1 if params.score else min(params.max_tokens, room))
    found.endless.append(params.ignore_eos and not (params.stop or params.stop_token_ids))
    found.cut += params.max_tokens > room and not params.score
    found.told += params.logprobs is not None or bool(params.score)
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
    if params.score:  # nothing is generated
        params = params.model_copy(update={"max_tokens": 1, "score": ()})
    kept = Request(request.job_id, request.attempt, request.prompt_ids, params, seed)
    if place == len(found.sample):
        found.sample.append(kept)
    else:
        found.sample[place] = kept
