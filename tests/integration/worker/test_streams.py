"""Texts read while real workers generate them, one of which is killed in the middle."""

import signal
import threading

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.client.client import Client
from nightmill.jobs.streams.pieces import Piece
from tests.integration.worker.conftest import StartWorker, on_postgresql
from tests.support.servers import LONG_TOKENS, wait_until

PATIENCE = 120.0
JOBS = 6


@pytest.mark.slow  # the campaign's readers follow streams over killed workers
@on_postgresql
def test_streams_outlive_the_worker_and_joined_are_the_rows_texts(
    jobs_client: Client, start_worker: StartWorker
) -> None:
    ids = [
        jobs_client.enqueue(f"Once upon a time number {n}", seed=n, max_tokens=LONG_TOKENS, ignore_eos=True)
        for n in range(JOBS)
    ]
    read: dict[str, list[Piece]] = {job_id: [] for job_id in ids}

    def follow(job_id: str) -> None:
        for piece in jobs_client.stream(job_id, timeout=PATIENCE):
            read[job_id].append(piece)

    def follow_in_turns(job_id: str) -> None:
        """A reader that leaves after every few pieces, and comes back with the place of the last."""
        pieces, over = read[job_id], False
        while not over:
            over = True
            for piece in jobs_client.stream(
                job_id, after=pieces[-1].place if pieces else None, timeout=PATIENCE
            ):
                pieces.append(piece)
                if len(pieces) % 5 == 0:
                    over = False
                    break

    readers = [
        threading.Thread(target=follow_in_turns if number % 2 else follow, args=(job_id,), daemon=True)
        for number, job_id in enumerate(ids)
    ]
    for reader in readers:
        reader.start()
    several = jobs_client.enqueue("Once upon a time", n=3, seed=1, max_tokens=LONG_TOKENS, temperature=1.5)
    third: list[Piece] = []
    reader = threading.Thread(
        target=lambda: third.extend(jobs_client.stream(several, answer=2, timeout=PATIENCE)), daemon=True
    )
    reader.start()
    readers.append(reader)
    with start_worker("killed", save_seconds=0.2) as killed:
        wait_until(lambda: all(len(read[job_id]) > 3 for job_id in ids[::2]) or _ended(jobs_client, ids))
        killed.send_signal(signal.SIGKILL)
        killed.wait(240)
    with start_worker("next"):
        for reader in readers:
            reader.join(PATIENCE)
            assert not reader.is_alive()
        answers = jobs_client.get(several).answers
        alone = [
            jobs_client.enqueue("Once upon a time", seed=answer.seed, max_tokens=LONG_TOKENS, temperature=1.5)
            for answer in answers
        ]
        assert [job.text for job in jobs_client.results(alone, timeout=PATIENCE)] == [
            answer.text for answer in answers
        ]
    assert len({answer.text for answer in answers}) == 3
    assert "".join(third) == answers[2].text
    for job_id in ids:
        job = jobs_client.get(job_id)
        assert job.state is JobState.SUCCEEDED
        assert "".join(read[job_id]) == job.text
    assert max(len(pieces) for pieces in read.values()) > 5


def _ended(client: Client, ids: list[str]) -> bool:
    return all(client.get(job_id).state.final for job_id in ids)
