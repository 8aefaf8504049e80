"""Additional output of commands about batches submitted over HTTP."""

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.printable import printable
from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatch, HttpBatchStore


def http_batch(client: Client, name: str) -> HttpBatch | None:
    """Return the HTTP batch whose rows have this name, if any; its rows may not be entered yet."""
    if not name.startswith(BATCH_PREFIX):
        return None
    return HttpBatchStore(client.database).get(name.removeprefix(BATCH_PREFIX))


def describe_http(batch: HttpBatch) -> str:
    """Describe its status for servers, delays, and errors of the whole file."""
    lines = [f"  {'over HTTP':11}{batch.status}"]
    if batch.note is not None:
        lines.append(f"  {'delayed':11}{printable(batch.note)}")
    lines += [f"  {'file':11}{printable(str(error['message']))}" for error in _of_the_file(batch)]
    return "\n".join(lines)


def http_values(batch: HttpBatch) -> JsonObject:
    """Return the same as JSON values."""
    return {"status": str(batch.status), "note": batch.note, "errors": _of_the_file(batch)}


def _of_the_file(batch: HttpBatch) -> list[JsonObject]:
    return [error for error in batch.errors if error.get("line") is None]
