"""What commands say of batches that came over HTTP, beside what they say of every batch."""

from nightmill.jobs.client import Client
from nightmill.jobs.contract import JsonObject
from nightmill.jobs.printable import printable
from nightmill.jobs.sql.http_batches import BATCH_PREFIX, HttpBatch, HttpBatchStore


def http_batch(client: Client, name: str) -> HttpBatch | None:
    """The batch over HTTP whose rows have this name, if there is one; its rows need not be there yet."""
    if not name.startswith(BATCH_PREFIX):
        return None
    return HttpBatchStore(client.database).get(name.removeprefix(BATCH_PREFIX))


def describe_http(batch: HttpBatch) -> str:
    """Where it stands for servers, why it does not go on, and what is wrong with its file as a whole."""
    lines = [f"  {'over HTTP':11}{batch.status}"]
    if batch.note is not None:
        lines.append(f"  {'delayed':11}{printable(batch.note)}")
    lines += [f"  {'file':11}{printable(str(error['message']))}" for error in _of_the_file(batch)]
    return "\n".join(lines)


def http_values(batch: HttpBatch) -> JsonObject:
    """The same for programs."""
    return {"status": str(batch.status), "note": batch.note, "errors": _of_the_file(batch)}


def _of_the_file(batch: HttpBatch) -> list[JsonObject]:
    return [error for error in batch.errors if error.get("line") is None]
