"""The outcome of a job whose answers have all ended: what its row then says of them together."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.reply import token_ids
from nightmill.jobs.reply.answers import answer_seed, split_answer_id
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.reply.logprobs import read, total
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Outcome
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.worker.engine.request import Completion
from nightmill.worker.service.in_flight import JobKey, Noted

_UNSUCCESSFUL = (StopReason.ERROR, StopReason.DEADLINE, StopReason.BUDGET, StopReason.CANCELLED)

Tokens = tuple[int, ...]


@dataclass(slots=True)
class JobAnswers:
    """The answers of a job in hand, as far as they are known here."""

    params: GenerationParams
    prompt_ids: Tokens
    seed: int
    drawn: list[Tokens]  # of each answer
    ended: list[Completion | None]
    left: int  # answers that have not ended
    grown: bool = False  # since its tokens were last saved
    scored: tuple[str, ...] = ()  # the answers are these texts, which were given
    reasoning_tokens: int = 0  # of the answers that have ended
    prompt_tokens: int = 0  # of a job with such texts, without them
    echo: str | None = None  # the text of each answer, if nothing is to be generated
    of_prompt: bytes | None = None  # its log-probabilities
    logprobs: list[bytes | None] = field(init=False)  # the log-probabilities of those that have ended

    def __post_init__(self) -> None:
        self.logprobs = [None] * self.left

    @property
    def draws_nothing(self) -> bool:
        """True if the job draws no text: what an engine draws all the same is dropped."""
        return bool(self.scored) or self.echo is not None


def outcome_of(key: JobKey, row: JobAnswers, arithmetic: str, noted: Noted) -> Outcome:
    """Build the outcome of a job of which each answer is recorded in `row`."""
    if row.echo is not None:
        made = _echoed(key, row, row.echo, arithmetic)
    else:
        made = _scored(key, row, arithmetic) if row.scored else _outcome(key, row, arithmetic)
        if row.params.rerank is not None:
            made = _ranked(made, row)
    saved = _saved(key, noted, made.drawn)
    return replace(made, markup=noted.markup, prompt_digest=noted.prompt_digest, saved=saved)


def outcome_of_one(
    completion: Completion, arithmetic: str, logprobs: bytes | None, thought: int, noted: Noted
) -> Outcome:
    """Build the outcome of a job with one answer; `thought` are the tokens of its reasoning."""
    # Those of a job with log-probabilities are not kept: it would have to begin afresh.
    drawn = completion.token_ids if logprobs is None and _is_cut(completion) else ()
    return Outcome(
        job_id=completion.job_id,
        attempt=completion.attempt,
        stop_reason=completion.stop_reason,
        text=completion.text,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        cached_tokens=completion.cached_tokens,
        reasoning_tokens=thought,
        error=completion.error,
        arithmetic=arithmetic,
        gpu_seconds=completion.gpu_seconds,
        energy_joules=completion.energy_joules,
        logprobs=() if logprobs is None else (logprobs,),
        embedding=completion.embedding,
        drawn=drawn,
        markup=noted.markup,
        prompt_digest=noted.prompt_digest,
        saved=_saved((completion.job_id, completion.attempt), noted, drawn),
    )


def pack(drawn: Sequence[Tokens]) -> Tokens:
    """The tokens of all answers of a job in one list: how many each has, and then these."""
    return tuple(item for tokens in drawn for item in (len(tokens), *tokens))


def unpack(packed: Tokens, count: int) -> list[Tokens]:
    """Split what `pack` made of the tokens of `count` answers; no tokens for each if it is not that."""
    drawn: list[Tokens] = []
    place = 0
    while place < len(packed) and packed[place] >= 0:
        end = place + 1 + packed[place]
        drawn.append(packed[place + 1 : end])
        place = end
    return drawn if place == len(packed) and len(drawn) == count else [()] * count


def _saved(key: JobKey, noted: Noted, drawn: Tokens) -> SavedTokens | None:
    return SavedTokens(*key, noted.fingerprint, drawn) if drawn and noted.fingerprint else None


def _is_cut(completion: Completion) -> bool:
    return completion.stop_reason is StopReason.LENGTH


def _outcome(key: JobKey, row: JobAnswers, arithmetic: str) -> Outcome:
    """The job stopped for the reason of its first answer, unless one of them has not succeeded."""
    ended = [completion for completion in row.ended if completion is not None]
    decisive = ended[0]
    if any(completion.stop_reason.state is not JobState.SUCCEEDED for completion in ended):
        decisive = min(
            (completion for completion in ended if completion.stop_reason in _UNSUCCESSFUL),
            key=lambda completion: _UNSUCCESSFUL.index(completion.stop_reason),
        )
    joules = [completion.energy_joules for completion in ended]
    error = decisive.error
    if error is not None and any(completion.error != error for completion in ended):
        error = f"answer {split_answer_id(decisive.job_id)[1]}: {error}"
    return Outcome(
        job_id=key[0],
        attempt=key[1],
        stop_reason=decisive.stop_reason,
        text=ended[0].text,
        prompt_tokens=ended[0].prompt_tokens,
        completion_tokens=sum(completion.completion_tokens for completion in ended),
        cached_tokens=ended[0].cached_tokens,
        reasoning_tokens=row.reasoning_tokens,
        gpu_seconds=sum(completion.gpu_seconds for completion in ended),
        energy_joules=None if None in joules else sum(filter(None, joules)),
        error=error,
        arithmetic=arithmetic,
        prompt_logprobs=row.of_prompt,
        token_ids=_token_ids(row),
        answers=tuple(
            Answer(
                completion.text,
                completion.stop_reason,
                completion.completion_tokens,
                answer_seed(row.seed, number),
            )
            for number, completion in enumerate(ended if len(ended) > 1 or row.scored else ())
        ),
        logprobs=tuple(row.logprobs),
        drawn=_drawn_of_cut(row, ended),
    )


def _drawn_of_cut(row: JobAnswers, ended: Sequence[Completion]) -> Tokens:
    """The tokens of all answers, as they are saved, if one of them was cut and could go on."""
    if row.draws_nothing or row.params.logprobs is not None or row.params.prompt_logprobs is not None:
        return ()
    if not any(map(_is_cut, ended)) or any(one.stop_reason.state is not JobState.SUCCEEDED for one in ended):
        return ()
    return pack(row.drawn) if len(row.drawn) > 1 else row.drawn[0]


def _token_ids(row: JobAnswers) -> bytes | None:
    """For its row, if the job asked for them. An answer's end with the token that ended it."""
    if not row.params.return_token_ids:
        return None
    drawn: list[Tokens] = [()] * len(row.drawn) if row.draws_nothing else row.drawn
    return token_ids.pack(row.prompt_ids, drawn)


def _echoed(key: JobKey, row: JobAnswers, echo: str, arithmetic: str) -> Outcome:
    """Build the outcome of a job that generated nothing: its limit, no token, ended it."""
    made = _outcome(key, row, arithmetic)
    ended: dict[str, Any] = {"text": echo, "completion_tokens": 0}
    if made.stop_reason.state is JobState.SUCCEEDED:
        ended["stop_reason"] = StopReason.LENGTH
    answers = tuple(replace(answer, **ended) for answer in made.answers)
    return replace(made, **ended, answers=answers)


def _scored(key: JobKey, row: JobAnswers, arithmetic: str) -> Outcome:
    """Build the outcome of a job with texts to score.

    Its text is the likeliest of them, unless not all of them could be scored.
    """
    made = _outcome(key, row, arithmetic)
    logprobs = [read(data or b"") or () for data in row.logprobs]
    answers = tuple(
        replace(answer, completion_tokens=len(tokens))
        for answer, tokens in zip(made.answers, logprobs, strict=True)
    )
    text = ""
    if made.stop_reason.state is JobState.SUCCEEDED:
        made = replace(made, stop_reason=StopReason.EOS)
        answers = tuple(replace(answer, stop_reason=StopReason.EOS) for answer in answers)
        text = row.scored[max(range(len(logprobs)), key=lambda number: total(logprobs[number]))]
    return replace(
        made,
        text=text,
        answers=answers,
        completion_tokens=sum(map(len, logprobs)),
        prompt_tokens=row.prompt_tokens,
        cached_tokens=min(made.cached_tokens, row.prompt_tokens),
    )


def _ranked(made: Outcome, row: JobAnswers) -> Outcome:
    """Turn the scores of yes and no into the logit of a document's relevance, which is all that is kept."""
    made = replace(made, answers=(), logprobs=(), text="")
    if made.stop_reason.state is not JobState.SUCCEEDED:
        return made
    yes, no = (total(read(data or b"") or ()) for data in row.logprobs)
    return replace(made, embedding=struct.pack("<f", yes - no))
