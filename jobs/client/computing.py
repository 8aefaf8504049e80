"""Scores, embeddings and relevances that a program waits for; each is computed by a job."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Unpack

from nightmill.jobs.base.contract import Prompt
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.formats.frames import Prompts
from nightmill.jobs.reply.embeddings import Embedding
from nightmill.jobs.reply.job import Job, embedding_of, relevance_in, scores_of
from nightmill.jobs.reply.logprobs import Scores
from nightmill.jobs.request.fields import JobSettings


def to_score(texts: Sequence[str]) -> Sequence[str]:
    """Return texts that are to be scored. Raises InvalidParameterError for none, as a job would generate."""
    if not texts:
        raise InvalidParameterError("score: there is no text; give at least one", field="score")
    return texts


class Computations(ABC):
    """Queues the jobs of a computation, waits until all have ended, and returns what they have computed.

    How jobs are queued, waited for and read is left to `Client`.
    """

    @abstractmethod
    def enqueue(self, prompt: Prompt, **settings: Unpack[JobSettings]) -> str:
        """Queue one prompt; returns its job id."""

    @abstractmethod
    def enqueue_many(self, prompts: Prompts, **settings: Unpack[JobSettings]) -> Sequence[str]:
        """Queue every prompt of an iterable; returns their job ids."""

    @abstractmethod
    def get(self, job_id: str) -> Job:
        """Return a snapshot of one job."""

    @abstractmethod
    def wait(self, jobs: str | Iterable[str] | None = None, *, timeout: float | None = None) -> None:
        """Return when the jobs are all final."""

    @abstractmethod
    def results(self, jobs: Iterable[str] | None = None, *, timeout: float | None = None) -> Iterator[Job]:
        """Yield finished jobs in the order of enqueueing."""

    def score(
        self, prompt: Prompt, texts: Sequence[str], *, timeout: float | None = None,
        **settings: Unpack[JobSettings],
    ) -> Scores:  # fmt: skip
        """Compute how likely each text is after a prompt. Queues a job, and waits until it has ended.

        Keywords are those of `enqueue`; `logprobs=N` adds the likeliest tokens at each position. Raises
        InvalidRequestError, WaitTimeoutError, and ScoreError if the job ended otherwise.
        """
        settings["score"] = to_score(texts)
        job_id = self.enqueue(prompt, **settings)
        self.wait(job_id, timeout=timeout)
        return scores_of(self.get(job_id))

    def embed_many(
        self, texts: Iterable[Prompt], *, timeout: float | None = None, **settings: Unpack[JobSettings]
    ) -> list[Embedding]:
        """Compute the embedding of each text, in their order. Queues jobs, and waits until all have ended.

        Keywords are those of `enqueue`, with `dimensions` and `pooling`. For so many texts that their
        embeddings do not fit into memory submit a batch with `embed=True`, and read its results.

        Raises InvalidRequestError, WaitTimeoutError, and EmbeddingError if a job ended otherwise.
        """
        settings["embed"] = True
        job_ids = self.enqueue_many(texts, **settings)
        return [embedding_of(job) for job in self.results(job_ids, timeout=timeout)]

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        timeout: float | None = None,
        **settings: Unpack[JobSettings],
    ) -> list[float]:
        """Compute how relevant each document is for a query, 0 to 1, in their order. Queues jobs, and waits.

        Keywords are those of `enqueue`, with `instruction`, which models that chat are given.

        Raises InvalidRequestError, WaitTimeoutError, and RerankError if a job ended otherwise.
        """
        settings["rerank"] = query
        job_ids = self.enqueue_many(documents, **settings)
        return [relevance_in(job) for job in self.results(job_ids, timeout=timeout)]
