"""The one Celery task: run a shard of jobs."""

from collections.abc import Callable, Sequence

from celery import Celery

from nightmill.jobs.messages.shards import TASK


def register(app: Celery, run_shard: Callable[[Sequence[str]], None]) -> None:
    """Bind the task to a service. Called when the engine is ready, before the first message is taken.

    Its argument has been checked by the message filter, which made the message.
    """

    @app.task(name=TASK, acks_late=True, ignore_result=True)
    def run(job_ids: list[str]) -> None:
        run_shard(job_ids)
