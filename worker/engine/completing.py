"""What a request has to show: its completion at the end, or what it has so far."""

from collections.abc import Callable

from nightmill.jobs.contract import StopReason
from nightmill.worker.engine.request import Completion, Partial, Request, Sequence

__all__ = ["completion", "not_computed", "snapshot"]

Decode = Callable[[list[int]], str]
"""The text of all tokens at once."""


def completion(sequence: Sequence, decode: Decode, reason: StopReason, error: str | None) -> Completion:
    """Of a sequence that ends for `reason`; of a stop sequence if its last bytes complete one."""
    request, watch = sequence.request, sequence.watch
    drawn = sequence.tokens[sequence.prompt_length :]
    if watch is None:
        ended = reason in (StopReason.EOS, StopReason.STOP_SEQUENCE)  # by a token, which is no text
        text = decode(drawn[:-1] if ended else drawn)
    else:
        cut = watch.finish()
        text = watch.text
        if cut and reason in (StopReason.LENGTH, StopReason.CONTEXT_FULL, StopReason.EOS):
            reason = StopReason.STOP_SEQUENCE  # completed by the bytes that were still held back
    return Completion(
        job_id=request.job_id,
        attempt=request.attempt,
        token_ids=tuple(drawn),
        text="" if request.scores else request.echo + text,
        stop_reason=reason,
        prompt_tokens=sequence.prompt_length,
        completion_tokens=len(drawn),
        error=error,
        echoed=len(request.echo),
        told=sequence.told,
    )


def not_computed(request: Request, reason: StopReason, error: str | None) -> Completion:
    """Of a request that never became a sequence."""
    return Completion(request.job_id, request.attempt, (), "", reason, len(request.prompt_ids), 0, error)


def snapshot(sequence: Sequence, decode: Decode) -> Partial:
    """What a sequence has so far; a text that may yet be cut is told up to there."""
    request = sequence.request
    drawn = sequence.tokens[sequence.prompt_length :]
    text = decode(drawn) if sequence.watch is None else sequence.watch.decided
    return Partial(request.job_id, request.attempt, tuple(drawn), request.echo + text, sequence.prompt_length)
