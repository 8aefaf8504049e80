"""What rows add up to: the state of a batch tells the truth, and the estimate follows the pace."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.reply.batch_status import (
    BatchRecord,
    BatchState,
    ErrorGroup,
    Pace,
    RowCount,
    group_errors,
    make_status,
    status_values,
    unserved_sentence,
)

NOW = datetime(2026, 1, 1, 22, 0, tzinfo=UTC)
SUBMITTED = BatchRecord("night", "model", NOW - timedelta(hours=1), format="jsonl", row_count=10)
OK, BAD, LATE, GONE = (
    RowCount(JobState.SUCCEEDED, StopReason.EOS, 4, 40, 80),
    RowCount(JobState.FAILED, StopReason.ERROR, 3),
    RowCount(JobState.FAILED, StopReason.DEADLINE, 2, 20, 10),
    RowCount(JobState.CANCELLED, StopReason.CANCELLED, 1),
)
WAITING, WORKING = RowCount(JobState.QUEUED, None, 5), RowCount(JobState.RUNNING, None, 2)
CANCELLED = {"cancel_requested_at": NOW}


@pytest.mark.parametrize(
    ("counts", "changes", "state"),
    [
        ([], {"row_count": None}, BatchState.SUBMITTING),
        ([OK, WAITING, WORKING], {"row_count": None}, BatchState.SUBMITTING),
        ([OK, WAITING, WORKING], {}, BatchState.RUNNING),
        ([WORKING], CANCELLED, BatchState.RUNNING),  # until they have stopped
        ([OK, WAITING], {}, BatchState.QUEUED),
        ([WAITING], {"scheduled_at": NOW + timedelta(seconds=1)}, BatchState.SCHEDULED),
        ([WAITING], {"scheduled_at": NOW}, BatchState.QUEUED),
        ([OK], {}, BatchState.COMPLETED),
        ([OK], CANCELLED, BatchState.COMPLETED),  # too late: it ended no row
        ([OK, BAD], {}, BatchState.COMPLETED_WITH_ERRORS),
        ([OK, GONE], {}, BatchState.COMPLETED_WITH_ERRORS),  # somebody cancelled that job by itself
        ([OK, BAD, LATE, GONE], CANCELLED, BatchState.CANCELLED),
        ([BAD, LATE], CANCELLED, BatchState.EXPIRED),
        ([OK, BAD, LATE, GONE], {}, BatchState.EXPIRED),
        ([LATE], {}, BatchState.EXPIRED),
        ([BAD], {}, BatchState.FAILED),
        ([BAD, GONE], {}, BatchState.FAILED),
        ([OK, GONE], {"row_count": None} | CANCELLED, BatchState.CANCELLED),  # broken off and cancelled
        ([], {"format": None, "row_count": None}, BatchState.COMPLETED),
        ([], {"row_count": 0}, BatchState.FAILED),  # a file without rows
        ([], {"row_count": 0} | CANCELLED, BatchState.FAILED),
        ([OK, WAITING], {"format": None, "row_count": None}, BatchState.QUEUED),
    ],
)
def test_state_tells_the_truth(counts: list[RowCount], changes: dict[str, object], state: BatchState) -> None:
    status = make_status(replace(SUBMITTED, **changes), counts, None, [], NOW)  # type: ignore[arg-type]
    assert status.state is state


def test_final_states_are_those_after_which_nothing_happens() -> None:
    assert [state for state in BatchState if not state.final] == [
        BatchState.SUBMITTING,
        BatchState.RUNNING,
        BatchState.SCHEDULED,
        BatchState.QUEUED,
    ]


def test_counts_and_tokens_are_summed_by_state_and_by_stop_reason() -> None:
    errors = [ErrorGroup(3, "no")]
    status = make_status(SUBMITTED, [OK, BAD, LATE, GONE], None, errors, NOW)
    assert status.states == {JobState.SUCCEEDED: 4, JobState.FAILED: 5, JobState.CANCELLED: 1}
    assert status.stop_reasons == {
        StopReason.EOS: 4,
        StopReason.ERROR: 3,
        StopReason.DEADLINE: 2,
        StopReason.CANCELLED: 1,
    }
    assert (status.rows, status.done, status.succeeded, status.unsuccessful) == (10, 10, 4, 6)
    assert (status.prompt_tokens, status.completion_tokens, status.errors) == (60, 90, errors)
    assert (status.tokens_per_second, status.estimated_end) == (None, None)


def test_a_batch_that_follows_another_names_it_as_its_source() -> None:
    follows = replace(SUBMITTED, settings={"table": {"after": "drafts"}})
    assert make_status(follows, [OK], None, [], NOW).source == "rows after drafts"
    assert make_status(replace(SUBMITTED, source="a.csv"), [OK], None, [], NOW).source == "a.csv"
    assert make_status(SUBMITTED, [OK], None, [], NOW).source is None


def test_the_estimate_is_what_is_left_at_the_pace_of_the_last_minute() -> None:
    pace = Pace(rows=2, completion_tokens=300, seconds=60.0)
    running = make_status(SUBMITTED, [OK, WORKING], pace, [], NOW)
    assert running.tokens_per_second == 5.0
    assert running.estimated_end == NOW + timedelta(seconds=180)  # 6 of 10 rows are left, at 2 a minute
    ended = make_status(SUBMITTED, [OK, BAD], pace, [], NOW)
    assert (ended.tokens_per_second, ended.estimated_end) == (5.0, None)
    scheduled = replace(SUBMITTED, scheduled_at=NOW + timedelta(hours=1))
    assert make_status(scheduled, [OK, WAITING], pace, [], NOW).estimated_end is None


def test_rows_that_nobody_serves_have_no_expected_end_and_are_named() -> None:
    pace = Pace(rows=2, completion_tokens=300, seconds=60.0)
    status = make_status(SUBMITTED, [OK, WAITING], pace, [], NOW, unserved=["m"])
    assert (status.unserved, status.estimated_end) == (["m"], None)
    assert unserved_sentence(["m"]) == "no live worker serves 'm': rows wait for one"
    assert unserved_sentence([None]) == "no worker is running: rows wait for one"
    many = unserved_sentence([None, *"abcdefg", "x\x1b"], "at six")
    assert many == (
        "no live worker serves 'a', 'b', 'c', 'd', 'e' and 3 others: rows wait for one; unless one comes, "
        "they expire at six"
    )
    assert "\x1b" not in unserved_sentence(["x\x1b"])


def test_errors_that_are_left_out_of_a_list_are_counted() -> None:
    status = make_status(SUBMITTED, [OK, BAD], None, [ErrorGroup(1, "no")], NOW)
    assert status.unlisted_errors == 2 and status_values(status)["unlisted_errors"] == 2
    assert make_status(SUBMITTED, [OK, BAD], None, [], NOW).unlisted_errors == 0  # nobody asked for errors


def test_errors_that_differ_in_numbers_only_are_one_group() -> None:
    counted = [("the deadline passed after 7 tokens", 5), ("prompt: is empty", 6)]
    counted += [("the deadline passed after 1,212 tokens", 2), ("the prompt has 9 tokens", 1)]
    assert group_errors(counted, 2) == [
        ErrorGroup(7, "the deadline passed after 7 tokens"),
        ErrorGroup(6, "prompt: is empty"),
    ]
