"""The transport of job ids: Celery and Redis."""
