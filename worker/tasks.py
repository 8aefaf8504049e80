"""The one Celery task: run a shard of jobs."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from celery import Celery
from pydantic import TypeAdapter, ValidationError

from jobs.broker import TASK

log = logging.getLogger(__name__)

_SHARD = TypeAdapter(list[str])


def register(app: Celery, run_shard: Callable[[Sequence[str]], None]) -> None:
    """Bind the task to a service. Called when the engine is ready, before the first message is taken."""

    @app.task(name=TASK, acks_late=True, ignore_result=True)
    def run(job_ids: Any) -> None:
        try:
            shard = _SHARD.validate_python(job_ids, strict=True)
        except ValidationError:
            log.error("a message that is not a list of job ids was dropped")
            return
        run_shard(shard)
