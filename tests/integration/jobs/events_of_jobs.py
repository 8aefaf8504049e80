"""What may happen to jobs, as strategies: calls of methods of the machine in `machine_of_jobs`."""

from datetime import timedelta
from typing import Any

import hypothesis.strategies as st

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.request.spec import JobSpec

QUEUED, RUNNING = JobState.QUEUED, JobState.RUNNING
SUCCEEDED, FAILED, CANCELLED = JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED
STALE_AFTER = timedelta(seconds=30)
WORKERS = 2
MOST_JOBS = 4  # few, so that much happens to each


deadlines = st.sampled_from([None] * 4 + [timedelta(seconds=1), timedelta(seconds=40)])
job_options = st.builds(
    JobSpec,
    priority=st.sampled_from([2, 5]),
    max_attempts=st.integers(1, 3),
    deadline=deadlines,
    scheduled_at=deadlines,
)


workers = st.integers(0, WORKERS - 1)
numbers = st.integers(0, 7)  # of a job or a claim, as far as there are so many
saves = st.tuples(numbers, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3))
endings = st.tuples(numbers, st.sampled_from(StopReason), st.sampled_from(["", "text\x00", "ünï"]))


def happens(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """A call of the machine's method `name`."""
    return st.tuples(st.just(name), *arguments)


# One rule that chooses among these, since Hypothesis switches rules off for whole histories to vary them, and
# what is to be found here needs nearly all of them.
EVENTS = st.one_of(
    happens("enqueue", job_options),
    happens("cancel", numbers),
    happens("retry", numbers, deadlines),
    happens("extend", st.integers(0, 9), deadlines),
    happens("retry_batch", st.sampled_from([FAILED, CANCELLED]), st.floats(0, 2), deadlines),
    happens("claim", workers, st.sets(numbers, min_size=1)),
    happens("claim_everything", workers),
    happens("claim_everything", workers),
    happens("claim_suspects", workers, st.integers(1, 3)),
    happens("claim_suspects", workers, st.integers(1, 3)),
    happens("finish", st.lists(endings, min_size=1, max_size=3)),
    happens("save", st.lists(saves, min_size=1, max_size=3)),
    happens("hand_back", numbers),
    happens("give_up", workers, st.integers(1, MOST_JOBS)),
    happens("zombies_write", workers),
    happens("beat", workers),
    happens("time_passes", st.sampled_from([1, 39, 40])),
    happens("rescue", workers),
    happens("expire"),
    happens("sweep"),
    happens("leave_queued", numbers),
)
