"""Deltas of the texts that are followed, up to where no later token can change them.

A delta is cut where the final text is: never inside a character, never in an end that may turn out to
begin a stop string. So the pieces of a text, joined, are the beginning of what its completion will say.
"""

from collections.abc import Iterable, Mapping

from nightmill.jobs.base.contract import storable
from nightmill.worker.engine.request import Delta, Sequence
from nightmill.worker.engine.stops import NewTokenDecoder, TokenDecoder, undecided_from


class FollowedTexts:
    """The texts that somebody follows; false if there are none."""

    def __init__(self, text_stream: NewTokenDecoder) -> None:
        self._text_stream = text_stream
        self._known: dict[str, FollowedText | None] = {}  # by job; None: not looked at yet

    def __bool__(self) -> bool:
        return bool(self._known)

    def follow(self, job_ids: Iterable[str]) -> None:
        """See `Engine.follow`."""
        before = self._known
        self._known = {job_id: before.get(job_id) for job_id in job_ids}

    def deltas(self, sequences: Mapping[str, Sequence]) -> list[Delta]:
        """See `Engine.deltas`; `sequences` are the unfinished ones by job."""
        found = []
        for job_id, followed in self._known.items():
            sequence = sequences.get(job_id)
            if sequence is None or sequence.request.scores:
                continue
            request = sequence.request
            if followed is None or followed.attempt != request.attempt:
                followed = FollowedText(
                    request.attempt, request.params.stop, self._text_stream(), request.echo
                )
                self._known[job_id] = followed
            if (delta := followed.more(sequence)) is not None:
                found.append(delta)
        return found


class FollowedText:
    """The text of one attempt at a job, from its beginning: `echo`, then what a fresh `stream` gives."""

    def __init__(self, attempt: int, stop: tuple[str, ...], stream: TokenDecoder, echo: str = "") -> None:
        self.attempt = attempt
        self._stop = stop
        self._stream = stream
        self._read = 0  # drawn tokens
        self._sent = 0  # characters
        self._likelihoods = 0  # tokens whose log-probabilities were sent
        self._held = echo  # not sent yet: it may begin a stop string

    def more(self, sequence: Sequence) -> Delta | None:
        """Return the text that was decided since the last call; None if that is nothing."""
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
        start, self._sent = self._sent, self._sent + end
        logprobs = sequence.logprobs_after(self._likelihoods)
        self._likelihoods += 0 if logprobs is None else len(logprobs.token_ids)
        # As the row will have it: where SQL cannot hold a character, another stands for it.
        counts = (sequence.prompt_length, self._read)
        return Delta(sequence.request.job_id, self.attempt, start, storable(text[:end]), logprobs, counts)
