"""Jobs with several answers, or texts to score: each is a request of its own, and the job ends with the last.

The requests differ in nothing but seed and name, so an answer has the text of a job that was enqueued alone
with its seed, and the engine computes their prompt once, as it does for any equal beginnings. Of those that
wait for a place, later answers let others go first: a job with many answers does not keep out those with one.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from nightmill.jobs.answers import answer_id, answer_seed, split_answer_id
from nightmill.jobs.contract import JobState, StopReason
from nightmill.jobs.job import Answer
from nightmill.jobs.logprobs import Spell, read, total
from nightmill.jobs.parameters import GenerationParams
from nightmill.jobs.sql.claims import Outcome
from nightmill.worker.engine.request import Completion, Partial, Progress, Request
from nightmill.worker.service.in_flight import InFlight, JobKey
from nightmill.worker.service.telling import logprobs_of

BEHIND = 16
"""So many requests that are submitted later go before an answer, for each answer of its job before it."""
_UNSUCCESSFUL = (StopReason.ERROR, StopReason.DEADLINE, StopReason.CANCELLED)

Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """A job in hand."""

    seed: int
    drawn: list[Tokens]  # of each answer, as far as they are known here
    ended: list[Completion | None]
    left: int  # answers that have not ended
    grown: bool = False  # since its tokens were last saved
    scored: tuple[str, ...] = ()  # the answers are these texts, which were given
    prompt_tokens: int = 0  # of a job with such texts, without them
    told: list[bytes | None] = field(init=False)  # the log-probabilities of those that have ended

    def __post_init__(self) -> None:
        self.told = [None] * self.left


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
        if count == 1:
            return [request]
        drawn = unpack(request.generated_ids, count)
        with self._lock:
            row = _Row(request.seed, drawn, [None] * count, left=count)
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

    def score(self, request: Request, texts: Sequence[Tokens]) -> list[Request]:
        """A job's request as the engine is to have it: one for each of these texts, which follow its prompt.

        An engine always draws a token: the one that would follow the text, which nobody is told of.
        """
        count, params = len(texts), request.params
        drawing = GenerationParams(max_tokens=1, temperature=0.0, logprobs=params.logprobs, seed=params.seed)
        with self._lock:
            row = _Row(
                request.seed, [()] * count, [None] * count, left=count, scored=params.score,
                prompt_tokens=len(request.prompt_ids),
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
                told_from=len(request.prompt_ids),
                scores=True,
                banned=(),
            )
            for number, text in enumerate(texts)
        ]

    def drop(self, key: JobKey) -> None:
        """Forget a job that ends in another way."""
        with self._lock:
            self._rows.pop(key, None)

    def dropped(self, reports: Sequence[Progress]) -> dict[JobKey, int]:
        """Forget the jobs of these answers, which the engine has dropped; returns the tokens of each."""
        tokens: Counter[JobKey] = Counter()
        for report in reports:
            tokens[key_of(report)] += len(report.token_ids)
        for key in tokens:
            self.drop(key)
        return dict(tokens)

    def names(self, keys: Sequence[JobKey]) -> list[str]:
        """What the engine calls the answers of these jobs."""
        with self._lock:
            counts = {key: len(self._rows[key].drawn) if key in self._rows else 1 for key in keys}
        return [answer_id(key[0], number) for key, count in counts.items() for number in range(count)]

    def completed(self, completion: Completion, arithmetic: str) -> Outcome | None:
        """What becomes of a job once its last answer has ended; None while others have not."""
        job_id, number = split_answer_id(completion.job_id)
        key = job_id, completion.attempt
        told = logprobs_of(completion, self._spell)
        with self._lock:
            row = self._rows.get(key)
            if row is None:
                return _outcome_of_one(completion, arithmetic, told) if number == 0 else None
            row.told[number] = told
            row.ended[number], row.drawn[number] = completion, completion.token_ids
            row.grown = True
            row.left -= 1
            if not row.left:
                del self._rows[key]
        if row.left:
            self._in_flight.lighten(key, row.left)
            return None
        return _scored(key, row, arithmetic) if row.scored else _outcome(key, row, arithmetic)

    def gather(self, reports: Sequence[Progress | Partial]) -> list[Progress]:
        """Reports on answers as reports on jobs, and on those jobs of which answers have ended since."""
        gathered: list[Progress] = []
        with self._lock:
            for report in reports:
                job_id, number = split_answer_id(report.job_id)
                row = self._rows.get((job_id, report.attempt))
                if row is not None:
                    if row.ended[number] is None:
                        row.drawn[number] = report.token_ids
                        row.grown = True
                elif number == 0:
                    gathered.append(Progress(job_id, report.attempt, report.token_ids))
            for (job_id, attempt), row in self._rows.items():
                if row.grown and any(row.drawn):
                    gathered.append(Progress(job_id, attempt, pack(row.drawn)))
                row.grown = False
        return gathered


def key_of(answer: Request | Progress) -> JobKey:
    """The job of an answer."""
    return split_answer_id(answer.job_id)[0], answer.attempt


def pack(drawn: Sequence[Tokens]) -> Tokens:
    """The tokens of all answers of a job in one list: how many each has, and then these."""
    return tuple(item for tokens in drawn for item in (len(tokens), *tokens))


def unpack(packed: Tokens, count: int) -> list[Tokens]:
    """What `pack` made of the tokens of `count` answers; none for each if it is not that."""
    drawn: list[Tokens] = []
    place = 0
    while place < len(packed) and packed[place] >= 0:
        end = place + 1 + packed[place]
        drawn.append(packed[place + 1 : end])
        place = end
    return drawn if place == len(packed) and len(drawn) == count else [()] * count


def _outcome_of_one(completion: Completion, arithmetic: str, told: bytes | None) -> Outcome:
    return Outcome(
        job_id=completion.job_id,
        attempt=completion.attempt,
        stop_reason=completion.stop_reason,
        text=completion.text,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        error=completion.error,
        arithmetic=arithmetic,
        logprobs=() if told is None else (told,),
    )


def _outcome(key: JobKey, row: _Row, arithmetic: str) -> Outcome:
    """The job stopped for the reason of its first answer, unless one of them has not succeeded."""
    ended = [completion for completion in row.ended if completion is not None]
    decisive = ended[0]
    if any(completion.stop_reason.state is not JobState.SUCCEEDED for completion in ended):
        decisive = min(
            (completion for completion in ended if completion.stop_reason in _UNSUCCESSFUL),
            key=lambda completion: _UNSUCCESSFUL.index(completion.stop_reason),
        )
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
        error=error,
        arithmetic=arithmetic,
        answers=tuple(
            Answer(
                completion.text,
                completion.stop_reason,
                completion.completion_tokens,
                answer_seed(row.seed, number),
            )
            for number, completion in enumerate(ended)
        ),
        logprobs=tuple(row.told),
    )


def _scored(key: JobKey, row: _Row, arithmetic: str) -> Outcome:
    """Of a job with texts to score: it ends with the likeliest, unless not all of them could be scored."""
    made = _outcome(key, row, arithmetic)
    told = [read(data or b"") or () for data in row.told]
    answers = tuple(
        replace(answer, completion_tokens=len(tokens))
        for answer, tokens in zip(made.answers, told, strict=True)
    )
    text = ""
    if made.stop_reason.state is JobState.SUCCEEDED:
        made = replace(made, stop_reason=StopReason.EOS)
        answers = tuple(replace(answer, stop_reason=StopReason.EOS) for answer in answers)
        text = row.scored[max(range(len(told)), key=lambda number: total(told[number]))]
    return replace(
        made,
        text=text,
        answers=answers,
        completion_tokens=sum(map(len, told)),
        prompt_tokens=row.prompt_tokens,
    )
