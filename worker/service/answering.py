"""Jobs with several answers, or texts to score: each is a request of its own, and the job ends with the last.

The requests differ in nothing but seed and name, so an answer has the text of a job that was enqueued alone
with its seed, and the engine computes their prompt once, as it does for any equal beginnings. Of those that
wait for a place, later answers let others go first: a job with many answers does not keep out those with one.
"""

import struct
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.reply import token_ids
from nightmill.jobs.reply.answers import answer_id, answer_seed, split_answer_id
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.reply.logprobs import Spell, read, total
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Cost, Outcome
from nightmill.jobs.sql.partials import SavedTokens
from nightmill.worker.engine.request import Completion, DrawnTokens, Partial, Request
from nightmill.worker.service.in_flight import InFlight, JobKey, Noted
from nightmill.worker.service.logprobs import apart, logprobs_of
from nightmill.worker.service.reasoning import reasoning_tokens

BEHIND = 16
"""So many requests that are submitted later go before an answer, for each answer of its job before it."""
_UNSUCCESSFUL = (StopReason.ERROR, StopReason.DEADLINE, StopReason.BUDGET, StopReason.CANCELLED)

YES_AND_NO = ("yes", "no")
"""The answers of a model that is asked whether a document is relevant."""

Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """A job in hand."""

    params: GenerationParams
    prompt_ids: Tokens
    seed: int
    drawn: list[Tokens]  # of each answer, as far as they are known here
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


class Answering:
    """The jobs with several answers that a worker has in hand. Jobs with one pass through.

    spell  how tokens are spelt in rows that keep log-probabilities

    Safe to share between threads: jobs come on one, what the engine says on another, and a third saves.
    """

    def __init__(self, in_flight: InFlight, spell: Spell) -> None:
        self._in_flight = in_flight
        self._spell = spell
        self._lock = threading.Lock()
        self._rows: dict[JobKey, _Row] = {}

    def split(self, request: Request) -> list[Request]:
        """A job's request as the engine is to have it: one for each answer.

        Where an earlier attempt left tokens, each goes on from its own; one that had ended then ends at once.
        """
        count = request.params.n
        if request.params.only_echo:
            return self._echo(request, count)
        if count == 1 and not request.params.tells_beside:
            return [request]
        drawn = [request.generated_ids] if count == 1 else unpack(request.generated_ids, count)
        with self._lock:
            row = _Row(request.params, request.prompt_ids, request.seed, drawn, [None] * count, left=count)
            self._rows[request.job_id, request.attempt] = row
        return [
            replace(
                request,
                job_id=answer_id(request.job_id, number),
                seed=answer_seed(request.seed, number),
                generated_ids=drawn[number],
                behind=number * BEHIND,
            )
            for number in range(count)
        ]

    def score(
        self, request: Request, texts: Sequence[Tokens], named: tuple[str, ...] | None = None
    ) -> list[Request]:
        """A job's request as the engine is to have it: one for each of these texts, which follow its prompt.

        An engine always draws a token: the one that would follow the text, which nobody is told of.

        named  the texts, if the job does not name them itself
        """
        count, params = len(texts), request.params
        drawing = _drawing(params)
        with self._lock:
            row = _Row(
                params, request.prompt_ids, request.seed, [()] * count, [None] * count, left=count,
                scored=named or params.score, prompt_tokens=len(request.prompt_ids),
            )  # fmt: skip
            self._rows[request.job_id, request.attempt] = row
        return [
            replace(
                request,
                job_id=answer_id(request.job_id, number),
                prompt_ids=request.prompt_ids + text,
                params=drawing,
                generated_ids=(),
                behind=number * BEHIND,
                prompt_logprobs_from=len(request.prompt_ids),
                scores=True,
                banned=(),
            )
            for number, text in enumerate(texts)
        ]

    @staticmethod
    def embed(request: Request, places: range, second: int | None = None) -> Request:
        """The request of a job that embeds its prompt: the hidden states at these places count.

        second  where the second text of a pair begins, whose relevance is asked for
        """
        asked = request.params
        if second is None:
            params = GenerationParams(embed=True, dimensions=asked.dimensions)
        else:
            params = GenerationParams(rerank=asked.rerank)
        return replace(
            request,
            params=params,
            embeds=places,
            second=second,
            generated_ids=(),
            constrained=None,
            banned=(),
        )

    def _echo(self, request: Request, count: int) -> list[Request]:
        """Split a job that generates nothing into a request for each answer: its answers are its prompt."""
        row = _Row(
            request.params, request.prompt_ids, request.seed, [()] * count, [None] * count, left=count,
            echo=request.echo,
        )  # fmt: skip
        with self._lock:
            self._rows[request.job_id, request.attempt] = row
        drawing = _drawing(request.params)
        return [
            replace(
                request,
                job_id=answer_id(request.job_id, number),
                params=drawing,
                generated_ids=(),
                behind=number * BEHIND,
                scores=True,
                banned=(),
                constrained=None,
            )
            for number in range(count)
        ]

    def drop(self, key: JobKey) -> None:
        """Forget a job that ends in another way."""
        with self._lock:
            self._rows.pop(key, None)

    def dropped(self, reports: Sequence[DrawnTokens]) -> dict[JobKey, int]:
        """Forget the jobs of these answers, which the engine has dropped; returns the tokens of each."""
        tokens: Counter[JobKey] = Counter()
        for report in reports:
            tokens[key_of(report)] += len(report.token_ids)
        for key in tokens:
            self.drop(key)
        return dict(tokens)

    def names(self, keys: Sequence[JobKey]) -> list[str]:
        """Return the engine's names for the answers of these jobs."""
        with self._lock:
            counts = {key: len(self._rows[key].drawn) if key in self._rows else 1 for key in keys}
        return [answer_id(key[0], number) for key, count in counts.items() for number in range(count)]

    def completed(self, completion: Completion, arithmetic: str) -> Outcome | None:
        """Record the end of an answer; return the job's outcome after the last one, until then None."""
        job_id, number = split_answer_id(completion.job_id)
        key = job_id, completion.attempt
        with self._lock:
            row = self._rows.get(key)
        noted = self._in_flight.noted(key)
        thought = reasoning_tokens(completion.token_ids, noted.markup, self._spell)
        if row is None:  # as most are; those of several answers are known before they are computed
            if number:
                return None
            return _outcome_of_one(
                completion, arithmetic, logprobs_of(completion, self._spell), thought, noted
            )
        of_prompt = None
        if number == 0:  # which alone was asked about it
            completion, of_prompt = apart(completion, row.params, self._spell)
        logprobs = logprobs_of(completion, self._spell, drawn=not row.draws_nothing)
        with self._lock:
            if self._rows.get(key) is not row:  # it was dropped meanwhile
                return None
            row.logprobs[number] = logprobs
            row.of_prompt = of_prompt or row.of_prompt
            row.ended[number], row.drawn[number] = completion, completion.token_ids
            row.reasoning_tokens += thought
            row.grown = True
            row.left -= 1
            if not row.left:
                del self._rows[key]
        if row.left:
            self._in_flight.set_unfinished(key, row.left)
            return None
        if row.echo is not None:
            made = _echoed(key, row, row.echo, arithmetic)
        else:
            made = _scored(key, row, arithmetic) if row.scored else _outcome(key, row, arithmetic)
            if row.params.rerank is not None:
                made = _ranked(made, row)
        saved = _saved(key, noted, made.drawn)
        return replace(made, markup=noted.markup, prompt_digest=noted.prompt_digest, saved=saved)

    def gather(self, reports: Sequence[DrawnTokens | Partial]) -> list[DrawnTokens]:
        """Reports on answers as reports on jobs, and on those jobs of which answers have ended since."""
        gathered: list[DrawnTokens] = []
        with self._lock:
            for report in reports:
                job_id, number = split_answer_id(report.job_id)
                row = self._rows.get((job_id, report.attempt))
                if row is not None:
                    if row.ended[number] is None:
                        row.drawn[number] = report.token_ids
                        row.grown = True
                elif number == 0:
                    gathered.append(DrawnTokens(job_id, report.attempt, report.token_ids))
            for (job_id, attempt), row in self._rows.items():
                if row.grown and any(row.drawn):
                    drawn = pack(row.drawn) if len(row.drawn) > 1 or row.draws_nothing else row.drawn[0]
                    gathered.append(DrawnTokens(job_id, attempt, drawn))
                row.grown = False
        return gathered


def key_of(answer: Request | DrawnTokens) -> JobKey:
    """The job of an answer."""
    return split_answer_id(answer.job_id)[0], answer.attempt


def costs_of(unfinished: Sequence[DrawnTokens]) -> dict[JobKey, Cost]:
    """Return the costs of jobs that the engine has dropped: sums over their answers."""
    costs: dict[JobKey, Cost] = {}
    for report in unfinished:
        seconds, joules = costs.get(key_of(report), (0.0, None))
        if report.energy_joules is not None:
            joules = (joules or 0.0) + report.energy_joules
        costs[key_of(report)] = seconds + report.gpu_seconds, joules
    return costs


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


def _drawing(params: GenerationParams) -> GenerationParams:
    """With which an engine computes a prompt of which it is to tell: it always draws a token."""
    return GenerationParams(max_tokens=1, temperature=0.0, logprobs=params.logprobs)


def _saved(key: JobKey, noted: Noted, drawn: Tokens) -> SavedTokens | None:
    return SavedTokens(*key, noted.fingerprint, drawn) if drawn and noted.fingerprint else None


def _outcome_of_one(
    completion: Completion, arithmetic: str, logprobs: bytes | None, thought: int, noted: Noted
) -> Outcome:
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


def _is_cut(completion: Completion) -> bool:
    return completion.stop_reason is StopReason.LENGTH


def _outcome(key: JobKey, row: _Row, arithmetic: str) -> Outcome:
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


def _drawn_of_cut(row: _Row, ended: Sequence[Completion]) -> Tokens:
    """The tokens of all answers, as they are saved, if one of them was cut and could go on."""
    if row.draws_nothing or row.params.logprobs is not None or row.params.prompt_logprobs is not None:
        return ()
    if not any(map(_is_cut, ended)) or any(one.stop_reason.state is not JobState.SUCCEEDED for one in ended):
        return ()
    return pack(row.drawn) if len(row.drawn) > 1 else row.drawn[0]


def _token_ids(row: _Row) -> bytes | None:
    """For its row, if the job asked for them. An answer's end with the token that ended it."""
    if not row.params.return_token_ids:
        return None
    drawn: list[Tokens] = [()] * len(row.drawn) if row.draws_nothing else row.drawn
    return token_ids.pack(row.prompt_ids, drawn)


def _echoed(key: JobKey, row: _Row, echo: str, arithmetic: str) -> Outcome:
    """Build the outcome of a job that generated nothing: its limit, no token, ended it."""
    made = _outcome(key, row, arithmetic)
    ended: dict[str, Any] = {"text": echo, "completion_tokens": 0}
    if made.stop_reason.state is JobState.SUCCEEDED:
        ended["stop_reason"] = StopReason.LENGTH
    answers = tuple(replace(answer, **ended) for answer in made.answers)
    return replace(made, **ended, answers=answers)


def _scored(key: JobKey, row: _Row, arithmetic: str) -> Outcome:
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


def _ranked(made: Outcome, row: _Row) -> Outcome:
    """Turn the scores of yes and no into the logit of a document's relevance, which is all that is kept."""
    made = replace(made, answers=(), logprobs=(), text="")
    if made.stop_reason.state is not JobState.SUCCEEDED:
        return made
    yes, no = (total(read(data or b"") or ()) for data in row.logprobs)
    return replace(made, embedding=struct.pack("<f", yes - no))
