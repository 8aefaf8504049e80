"""The rules of a job's life, apart from any model: which states follow which, what a row has in each."""

from typing import Any

from nightmill.jobs.base.contract import JobState

QUEUED, RUNNING = JobState.QUEUED, JobState.RUNNING
SUCCEEDED, FAILED, CANCELLED = JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED

ALLOWED = {
    (QUEUED, RUNNING),  # claim
    (QUEUED, CANCELLED),  # cancel
    (QUEUED, FAILED),  # expire
    (RUNNING, SUCCEEDED),  # finish
    (RUNNING, FAILED),  # finish, or the last attempt died
    (RUNNING, CANCELLED),  # finish, or handed back with a cancellation pending
    (RUNNING, QUEUED),  # hand back, give up, rescue
}
RETRY = {(FAILED, QUEUED), (CANCELLED, QUEUED)}
EXTEND = {(SUCCEEDED, QUEUED)}


def check_life(was: Any, row: Any, *, retried: bool, extended: bool = False) -> None:
    """A row may be as it is, after it was as it `was` (None: it is new)."""
    state = JobState(row.state)
    assert (row.finished_at is not None) is state.final
    assert (row.stop_reason is not None) is state.final
    assert state is not QUEUED or (row.worker is None and row.started_at is None)
    assert state is not RUNNING or (row.worker is not None and row.started_at is not None)
    assert state is not FAILED or row.error
    assert row.failures <= row.max_attempts
    assert len(row.errors or []) >= row.failures
    if was is None:
        assert state is QUEUED
        return
    assert row.attempt - was.attempt in (0, 1)
    assert (row.errors or [])[: len(was.errors or [])] == (was.errors or [])  # history only grows
    assert (row.seed, row.prompt, row.created_at) == (was.seed, was.prompt, was.created_at)
    assert (row.history or [])[: len(was.history or [])] == (was.history or [])
    if extended:
        assert (JobState(was.state), state, was.stop_reason) in {(*one, "length") for one in EXTEND}
        assert (row.text, row.arithmetic, row.completion_tokens) == (
            *(was.text, was.arithmetic, was.completion_tokens),
        )
        assert row.history[-1]["params"] == {"max_tokens": was.params["max_tokens"]}
    elif retried:
        assert (JobState(was.state), state) in RETRY
    elif JobState(was.state).final:
        assert row == was
    elif was.state != row.state:
        assert (JobState(was.state), state) in ALLOWED
