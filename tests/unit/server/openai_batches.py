"""Rows, files and batches as OpenAI's client hands them in, and waits for them."""

import json
from typing import Any

from tests.support.servers import wait_until

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


def row(custom_id: str, url: str = PLAIN, **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if url == CHAT else {"prompt": "Once"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": prompt | {"max_tokens": 9} | body}


def file_of(*rows: Any) -> tuple[str, bytes]:
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in rows]
    return "night.jsonl", b"\n".join(lines) + b"\n"


def submit(client: Any, *rows: Any, endpoint: Any = PLAIN, window: Any = "24h", **more: Any) -> Any:
    file = client.files.create(file=file_of(*rows), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **more)


def ended(client: Any, batch: Any) -> Any:
    return wait_until(
        lambda: (now := client.batches.retrieve(batch.id)).status not in OPEN and now, what="the batch"
    )


def lines(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def ended_at_last(client: Any, batch: Any) -> bool:
    return client.batches.retrieve(batch.id).status not in OPEN
