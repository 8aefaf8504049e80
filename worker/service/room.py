"""The step of Celery's consumer that asks for messages only while the worker has room for their jobs."""

from typing import Any

from celery import bootsteps


class RoomStep(bootsteps.StartStopStep):
    """Lets the consumer pull messages only while the service has room for their jobs.

    A consumer step, since a reconnect brings a new channel. Celery's own `worker_disable_prefetch` gates
    the channel in the same way, by the number of pool threads.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Put this limit on the new channel."""
        step = next(step for step in parent.controller.steps if hasattr(step, "service"))
        qos = parent.task_consumer.channel.qos
        within_prefetch = qos.can_consume

        def can_consume() -> bool:
            service = step.service
            return service is not None and service.in_flight.room > 0 and bool(within_prefetch())

        qos.can_consume = can_consume
