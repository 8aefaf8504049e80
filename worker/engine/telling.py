"""Tells the texts of requests as they grow, up to where no later token can change it.

What is told is cut where the final text is: never inside a character, never in an end that may turn out to
begin a stop string. So the pieces of a text, joined, are the beginning of what its completion will say.
"""

from collections.abc import Iterable, Mapping

from nightmill.jobs.contract import storable
from nightmill.worker.engine.request import Growth, Sequence
from nightmill.worker.engine.stops import NewTextStream, TextStream, undecided_from


class Tellings:
    """The texts that somebody follows; false if there are none."""

    def __init__(self, text_stream: NewTextStream) -> None:
        self._text_stream = text_stream
        self._known: dict[str, Telling | None] = {}  # by job; None: not looked at yet

    def __bool__(self) -> bool:
        return bool(self._known)

    def follow(self, job_ids: Iterable[str]) -> None:
        """See `Engine.follow`."""
        before = self._known
        self._known = {job_id: before.get(job_id) for job_id in job_ids}

    def growths(self, sequences: Mapping[str, Sequence]) -> list[Growth]:
        """See `Engine.growths`; `sequences` are the unfinished ones by job."""
        grown = []
        for job_id, telling in self._known.items():
            sequence = sequences.get(job_id)
            if sequence is None or sequence.request.scores:
                continue
            request = sequence.request
            if telling is None or telling.attempt != request.attempt:
                telling = Telling(request.attempt, request.params.stop, self._text_stream(), request.echo)
                self._known[job_id] = telling
            if (growth := telling.more(sequence)) is not None:
                grown.append(growth)
        return grown


class Telling:
    """The text of one attempt at a job, from its beginning: `echo`, then what a fresh `stream` gives."""

    def __init__(self, attempt: int, stop: tuple[str, ...], stream: TextStream, echo: str = "") -> None:
        self.attempt = attempt
        self._stop = stop
        self._stream = stream
        self._read = 0  # drawn tokens
        self._told = 0  # characters
        self._likelihoods = 0  # tokens whose log-probabilities were told
        self._held = echo  # what is not told yet: it may begin a stop string

    def more(self, sequence: Sequence) -> Growth | None:
        """What is decided since the last call; None if that is nothing."""
        if sequence.generated == self._read:
            return None
        push = self._stream.push
        fresh = [push(token) for token in sequence.tokens[sequence.prompt_length + self._read :]]
        self._read = sequence.generated
        text = self._held + "".join(fresh)
        end = undecided_from(text, self._stop)
        self._held = text[end:]
        if not end:
            return None
        start, self._told = self._told, self._told + end
        told = sequence.told_after(self._likelihoods)
        self._likelihoods += 0 if told is None else len(told.token_ids)
        # As the row will have it: where SQL cannot hold a character, another stands for it.
        return Growth(sequence.request.job_id, self.attempt, start, storable(text[:end]), told)
