"""Jobs with several answers, or texts to score: each is a request of its own, and the job ends with the last.

The requests differ in nothing but seed and name, so an answer has the text of a job that was enqueued alone
with its seed, and the engine computes their prompt once, as it does for any equal beginnings. Of those that
wait for a place, later answers let others go first: a job with many answers does not keep out those with one.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from nightmill.jobs.reply.answers import answer_id, answer_seed, split_answer_id
from nightmill.jobs.reply.logprobs import Spell
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Cost, Outcome
from nightmill.worker.engine.request import Completion, DrawnTokens, Partial, Request
from nightmill.worker.service.in_flight import InFlight, JobKey
from nightmill.worker.service.logprobs import apart, logprobs_of
from nightmill.worker.service.outcomes import JobAnswers, Tokens, outcome_of, outcome_of_one, pack, unpack
from nightmill.worker.service.reasoning import reasoning_tokens

BEHIND = 16
"""So many requests that are submitted later go before an answer, for each answer of its job before it."""

YES_AND_NO = ("yes", "no")
"""The answers of a model that is asked whether a document is relevant."""


class Answering:
    """The jobs with several answers that a worker has in hand. Jobs with one pass through.

    spell  how tokens are spelt in rows that keep log-probabilities

    Safe to share between threads: jobs come on one, what the engine says on another, and a third saves.
    """

    def __init__(self, in_flight: InFlight, spell: Spell) -> None:
        self._in_flight = in_flight
        self._spell = spell
        self._lock = threading.Lock()
        self._rows: dict[JobKey, JobAnswers] = {}

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
            row = JobAnswers(
                request.params, request.prompt_ids, request.seed, drawn, [None] * count, left=count
            )
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
            row = JobAnswers(
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
        row = JobAnswers(
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
            return outcome_of_one(
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
        return outcome_of(key, row, arithmetic, noted)

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


def _drawing(params: GenerationParams) -> GenerationParams:
    """With which an engine computes a prompt of which it is to tell: it always draws a token."""
    return GenerationParams(max_tokens=1, temperature=0.0, logprobs=params.logprobs)
