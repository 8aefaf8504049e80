"""Plain rows: `prompt` or `messages`, with the keywords of enqueue."""

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.request.fields import FIELDS, unknown_field
from nightmill.jobs.request.spec import JobSpec

# Fields of the whole batch, which a row may not set.
_OF_THE_BATCH = {
    "batch": "the whole file is one batch: name it when you submit it",
    "deadline": "it is given for the whole batch, when you submit it",
    "scheduled_at": "it is given for the whole batch, when you submit it",
    "idempotency_key": "in a batch, custom_id has its part",
}
ROW_KEYS = frozenset(FIELDS.keys() - _OF_THE_BATCH.keys() | {"prompt", "messages"})
"""Keys of a row."""


def plain_job(values: JsonObject, defaults: JobSpec) -> JobSpec:
    """Parse a plain row; raises InvalidRequestError."""
    for name, value in values.items():
        if name not in ROW_KEYS and value is not None:
            raise unknown_field(name, ROW_KEYS, _OF_THE_BATCH.get(name))
    return JobSpec.parse(values, defaults)
