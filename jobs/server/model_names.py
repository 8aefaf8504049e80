"""Names of models in responses."""

from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.server.job_service import JobService


async def model_of(service: JobService, spec: JobSpec, worker_id: str | None = None) -> str:
    """Return the requested model, or the one served by the worker that answered.

    While the worker is unknown, it is the model of all live ones; empty if they serve several.
    """
    if spec.model is not None:
        return spec.model
    return await served_model(service, worker_id)


async def served_model(service: JobService, worker_id: str | None) -> str:
    """Return the model like `model_of`, for a job that requested none."""
    worker = None if worker_id is None else await service.run(service.client.worker_store.get, worker_id)
    workers = await service.run(service.client.worker_store.serving) if worker is None else [worker]
    models = {worker.model for worker in workers}
    return models.pop() if len(models) == 1 else ""
