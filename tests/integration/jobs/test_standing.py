"""Numbers for those who watch over a database: counted by model, on both databases."""

from datetime import timedelta

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.queue_stats import EndedJobs, QueuedJobs, QueueStats
from nightmill.jobs.sql.sweep import Sweep
from tests.support.servers import Clock


def test_jobs_queues_and_workers_are_counted_by_model(server_settings: Settings, clock: Clock) -> None:
    with Client(server_settings, clock=clock) as client:
        standing = QueueStats(client.database)
        assert (standing.queued(), standing.running(), standing.ended(), standing.workers()) == ({},) * 4
        first, second = (Claims(client.database, name * 32) for name in "ab")
        for claims, model in ((first, "m"), (second, "n")):
            claims.register("host", 1, model, None)
        ids = client.enqueue_many(["prompt"] * 4, model="m")
        client.enqueue("any", scheduled_at=clock() + timedelta(hours=1))
        (done,) = first.claim([ids[0]])
        counted = {"cached_tokens": 1, "reasoning_tokens": 2}
        first.finish([Outcome(done.job_id, done.attempt, StopReason.EOS, "text", 3, 4, **counted)])
        second.claim([ids[1], ids[2]])
        client.cancel(client.enqueue("never mind", model="n"))
        clock.advance(seconds=20)
        assert standing.queued() == {"m": QueuedJobs(1, 0, 20.0), None: QueuedJobs(1, 0, 0.0)}
        assert standing.running() == {"m": 2}
        assert standing.ended() == {
            ("m", "succeeded"): EndedJobs(1, 3, 4, 1, 2),
            ("n", "cancelled"): EndedJobs(1, 0, 0, 0, 0),
        }
        assert standing.workers() == {("m", "starting"): 1, ("n", "starting"): 1}
        clock.advance(seconds=20)
        assert standing.workers() == {("m", "silent"): 1, ("n", "silent"): 1}
        Sweep(client.database).bury("b" * 32, blame=True)
        assert standing.queued()["m"] == QueuedJobs(3, 2, 40.0)
        assert standing.workers() == {("m", "silent"): 1, ("n", "lost"): 1}
