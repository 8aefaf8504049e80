"""How work arrives: job ids through Celery and Redis."""
