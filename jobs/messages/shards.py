"""Parsing of messages from the bytes in Redis. Nothing in them is trusted except well-formed job ids."""

import base64
import json
from typing import Any

from nightmill.jobs.base.ids import is_job_id
from nightmill.jobs.errors import MessageError

TASK = "nightmill.run_shard"
MOST_JOBS = 1024  # the maximum of `Settings.shard_size`
_LARGEST_MESSAGE = 1 << 20  # ours have some 100 bytes for each job: 1,024 jobs need 110 kB


def read_shard(message: bytes) -> list[str]:
    """Return the job ids of a message that announces a shard. Raises MessageError with the reason for others.

    Anybody who reaches Redis can write anything there, so nothing else in a message is evaluated.
    """
    if len(message) > _LARGEST_MESSAGE:
        raise MessageError("is larger than any message of Nightmill")
    envelope = _parse(message, "is not JSON")
    if not isinstance(envelope, dict) or not isinstance(envelope.get("headers"), dict):
        raise MessageError("has no headers")
    if envelope["headers"].get("task") != TASK:
        raise MessageError(f"is not for the task {TASK}")
    try:
        body = base64.b64decode(envelope["body"], validate=True)
    except (KeyError, TypeError, ValueError):  # binascii.Error is a ValueError
        raise MessageError("has a body that is not Base64") from None
    content = _parse(body, "has a body that is not JSON")
    try:
        job_ids = content[0][0]  # (positional arguments, keyword arguments, Celery's options)
    except (IndexError, KeyError, TypeError):
        raise MessageError("has no arguments") from None
    if not isinstance(job_ids, list) or not all(
        isinstance(job_id, str) and is_job_id(job_id) for job_id in job_ids
    ):
        raise MessageError("names something that is not a job id")
    if not 1 <= len(job_ids) <= MOST_JOBS:
        raise MessageError(f"names no jobs, or more than {MOST_JOBS:,}")
    return job_ids


def _parse(text: bytes, fault: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise MessageError(fault) from None
