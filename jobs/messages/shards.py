"""Messages as bytes in Redis. Nothing in them is trusted except well-formed job ids."""

import base64
import json
import uuid
from collections.abc import Sequence
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


def task_message(job_ids: Sequence[str], queue: str, priority: int) -> bytes:
    """Return a message that announces a shard, as kombu's Redis transport reads it (task protocol 2).

    priority  Redis's: 0 is the most urgent
    """
    task_id = str(uuid.uuid4())
    body = json.dumps([[list(job_ids)], {}, {}]).encode()
    return json.dumps(
        {
            "body": base64.b64encode(body).decode(),
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": {"lang": "py", "task": TASK, "id": task_id, "root_id": task_id},
            "properties": {
                "body_encoding": "base64",
                "correlation_id": task_id,
                # Its key among the unacknowledged: new, so that none is shared.
                "delivery_tag": str(uuid.uuid4()),
                "delivery_info": {"exchange": "", "routing_key": queue},  # put back, it comes to its queue
                "delivery_mode": 2,
                "priority": priority,
            },
        }
    ).encode()


def _parse(text: bytes, fault: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise MessageError(fault) from None
