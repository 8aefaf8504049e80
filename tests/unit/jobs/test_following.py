"""A reader of a text that is generated, at the end of its job."""

from datetime import UTC, datetime

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.errors import StreamChangedError
from nightmill.jobs.reply.job import Job
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.streams.pieces import START
from nightmill.jobs.streams.reader import Reader
from nightmill.jobs.streams.redis import TextChunk


def _job(state: JobState, text: str | None, reason: StopReason | None = None) -> Job:
    return Job(
        id="1", state=state, prompt="x", messages=None, params=GenerationParams(), text=text,
        stop_reason=reason, constrained=None, created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip


def _reader(read: str) -> Reader:
    reader = Reader("1", START, lambda: None)
    assert reader.give(TextChunk("", 0, read))
    assert reader.take() == (read, False)
    return reader


@pytest.mark.parametrize("saved", ["rain on", "", None])
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (JobState.FAILED, StopReason.DEADLINE),
        (JobState.FAILED, StopReason.ERROR),
        (JobState.CANCELLED, StopReason.CANCELLED),
    ],
)
def test_a_job_that_was_ended_early_has_ended_though_less_was_saved_than_was_read(
    state: JobState, reason: StopReason, saved: str | None
) -> None:
    reader, job = _reader("rain on the roof"), _job(state, saved, reason)
    reader.finish(job)
    assert reader.take() == (None, True)
    assert reader.job is job


def test_what_was_saved_beyond_what_was_read_comes_at_the_end() -> None:
    reader = _reader("rain on")
    reader.finish(_job(JobState.CANCELLED, "rain on the roof", StopReason.CANCELLED))
    assert reader.take() == (" the roof", False)


@pytest.mark.parametrize(
    ("state", "text"), [(JobState.SUCCEEDED, "rain"), (JobState.CANCELLED, "snow on the roof")]
)
def test_a_text_that_is_another_than_was_read_is_an_error(state: JobState, text: str) -> None:
    reader = _reader("rain on the")
    reader.finish(_job(state, text))
    with pytest.raises(StreamChangedError):
        reader.take()
