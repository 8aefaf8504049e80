"""The search for answers that may stand for others: one statement for the jobs of a shard.

Found are answers that were computed, not those that were taken from others, so that each names its origin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.contract import JobState, Markup, StopReason
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.request.reuse import Reuse
from nightmill.jobs.sql import answers, embeddings, logprobs, partials
from nightmill.jobs.sql.database import Database
from nightmill.jobs.sql.jobs import chunked
from nightmill.jobs.sql.outcomes import Outcome
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.jobs.sql.tables import JobRow

COMPLETE = (StopReason.EOS, StopReason.STOP_SEQUENCE, StopReason.LENGTH)
"""Stop reasons of answers that depend on the request alone, and not on the sizes of a worker."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A claimed job whose answer another's may be."""

    job_id: str
    attempt: int
    reuse: str
    content_key: str
    prompt_digest: str | None
    markup: Markup | None
    several: bool  # it has several answers
    tells: bool  # it tells log-probabilities or token ids
    embeds: bool = False


def find(database: Database, wanted: Sequence[Wanted], arithmetic: Arithmetic) -> list[Outcome]:
    """Return the outcomes of those of these jobs for which another's answer may stand.

    arithmetic  the worker's: for `exact` an answer must have been computed by it from the same tokens, for
                `any` by the same model
    """
    found: list[Outcome] = []
    with database.read() as connection:
        for chunk in chunked(wanted):
            found += _find(connection, chunk, arithmetic)
    return found


def _find(connection: Connection, wanted: Sequence[Wanted], arithmetic: Arithmetic) -> list[Outcome]:
    of_mode = {
        mode: [one.content_key for one in wanted if one.reuse == mode] for mode in (Reuse.EXACT, Reuse.ANY)
    }
    which = (
        and_(JobRow.content_key.in_(of_mode[Reuse.EXACT]), JobRow.arithmetic == str(arithmetic)),
        and_(
            JobRow.content_key.in_(of_mode[Reuse.ANY]),
            JobRow.arithmetic.endswith(str(arithmetic).rpartition("; ")[2], autoescape=True),
        ),
    )
    newest = (
        select(func.max(JobRow.id))
        .where(
            or_(*(part for part, keys in zip(which, of_mode.values(), strict=True) if keys)),
            JobRow.reused_from.is_(None),
            JobRow.state == JobState.SUCCEEDED,
            JobRow.stop_reason.in_(COMPLETE),
        )
        .group_by(JobRow.content_key, JobRow.prompt_digest)
    )
    rows = connection.execute(select(*_COLUMNS).where(JobRow.id.in_(newest)).order_by(JobRow.id.desc())).all()
    by_key: dict[str, list[Any]] = {}
    for row in rows:
        by_key.setdefault(row.content_key, []).append(row)
    pairs = [
        (one, row)
        for one in wanted
        for row in list(filter(partial(_stands_for, one), by_key.get(one.content_key, ())))[:1]
    ]
    several = {row.id: row.text for one, row in pairs if one.several}
    telling = sorted({row.id for one, row in pairs if one.tells})
    embedding = sorted({row.id for one, row in pairs if one.embeds})
    cut = sorted({row.id for _, row in pairs if row.stop_reason == StopReason.LENGTH or row.answers > 1})
    all_answers = answers.read(connection, several) if several else {}
    told = logprobs.read(connection, telling) if telling else {}
    packed = embeddings.read(connection, embedding) if embedding else {}
    saved = partials.find(connection, cut) if cut else {}
    return [
        replace(
            _outcome(one, row, all_answers.get(row.id, ()), told.get(row.id, {}), saved.get(row.id)),
            embedding=packed.get(row.id),
        )
        for one, row in pairs
    ]


def _outcome(
    one: Wanted,
    row: Any,
    of_several: tuple[Answer, ...],
    packed: Mapping[int, bytes],
    saved: SavedTokens | None,
) -> Outcome:
    """Build the outcome of a job from the row of another."""
    return Outcome(
        job_id=one.job_id,
        attempt=one.attempt,
        stop_reason=StopReason(row.stop_reason),
        text=row.text or "",
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        arithmetic=row.arithmetic,
        prompt_digest=row.prompt_digest,
        markup=Markup.read(row.markup),
        answers=of_several,
        logprobs=tuple(packed.get(number) for number in range(max(packed, default=-1) + 1)),
        prompt_logprobs=packed.get(logprobs.OF_PROMPT),
        token_ids=packed.get(logprobs.TOKEN_IDS),
        cached_tokens=row.prompt_tokens,
        reasoning_tokens=row.reasoning_tokens or 0,
        reused_from=row.id,
        # Of equal requests with other seeds the text belongs to its own.
        seed=row.seed if one.reuse == Reuse.ANY else None,
        saved=None if saved is None else replace(saved, job_id=one.job_id, attempt=one.attempt),
    )


_COLUMNS = (
    *(JobRow.id, JobRow.content_key, JobRow.seed, JobRow.stop_reason, JobRow.text, JobRow.prompt_tokens),
    *(JobRow.completion_tokens, JobRow.reasoning_tokens, JobRow.arithmetic, JobRow.prompt_digest),
    JobRow.markup,
    JobRow.answers,
)


def _stands_for(one: Wanted, row: Any) -> bool:
    """Return whether the answer is of the same tokens, too, and read in the same way."""
    if one.reuse == Reuse.ANY:
        return True
    return row.prompt_digest == one.prompt_digest and Markup.read(row.markup) == one.markup
