"""Builds completions of requests that ended, and partials of those that have not."""

from collections.abc import Callable

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.engine.request import Completion, Partial, Request, Sequence

__all__ = ["completion", "not_computed", "snapshot"]

Decode = Callable[[list[int]], str]
"""The text of all tokens at once."""


def completion(
    sequence: Sequence,
    decode: Decode,
    reason: StopReason,
    error: str | None,
    embedding: bytes | None = None,
    *,
    metered: bool = False,
) -> Completion:
    """Build the completion of a sequence that ends for `reason`; `metered`: its energy is known.

    The reason becomes a stop sequence if the bytes that were still held back complete one.
    """
    request, watch = sequence.request, sequence.watch
    drawn = sequence.tokens[sequence.prompt_length :]
    if watch is None:
        ended = reason in (StopReason.EOS, StopReason.STOP_SEQUENCE)  # by a token, which is no text
        if reason is StopReason.STOP_SEQUENCE and request.params.include_stop_str_in_output:
            ended = False
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
        cached_tokens=sequence.cached or 0,
        echoed=len(request.echo),
        logprobs=sequence.logprobs,
        gpu_seconds=sequence.seconds,
        energy_joules=sequence.joules if metered else None,
        embedding=embedding,
    )


def not_computed(request: Request, reason: StopReason, error: str | None) -> Completion:
    """Build the completion of a request that never became a sequence."""
    return Completion(request.job_id, request.attempt, (), "", reason, len(request.prompt_ids), 0, error)


def snapshot(sequence: Sequence, decode: Decode, *, metered: bool = False) -> Partial:
    """Return a sequence's tokens and text so far, without an end of the text that may yet be cut.

    metered  its energy is known
    """
    request = sequence.request
    drawn = sequence.tokens[sequence.prompt_length :]
    text = decode(drawn) if sequence.watch is None else sequence.watch.decided
    return Partial(
        request.job_id,
        request.attempt,
        tuple(drawn),
        request.echo + text,
        sequence.prompt_length,
        sequence.seconds,
        sequence.joules if metered else None,
    )
