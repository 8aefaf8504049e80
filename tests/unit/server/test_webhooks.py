"""A batch that came over HTTP may name who is told of its end; what is told names its files and no path."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nightmill.jobs.base.settings import Settings
from tests.support.receiver import Receiver, receiving
from tests.support.servers import wait_until

ROW = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture
def sqlite_settings(sqlite_settings: Settings, receiver: Receiver) -> Settings:
    """Settings that allow the receiver."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    allowed = {"webhook_urls": receiver.url, "webhook_secret": secret, "webhook_private": True}
    return sqlite_settings.model_copy(update=allowed)


def test_a_batch_over_http_is_told_of_once_its_files_are_written(
    start: Callable[..., Any], receiver: Receiver, tmp_path: Path
) -> None:
    with start() as server:
        client, asked = server.openai(), {"endpoint": "/v1/completions", "completion_window": "24h"}
        file = client.files.create(file=("rows.jsonl", ROW), purpose="batch")
        broken = client.files.create(file=("rows.jsonl", b'\xff\xfe{"no": "rows"}'), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="webhook: is not below one of the URLs") as refused:
            evil = {"webhook": "http://169.254.169.254/latest"}
            client.batches.create(input_file_id=file.id, **asked, extra_body=evil)
        assert refused.value.param == "webhook" and not client.batches.list().data  # type: ignore[union-attr]
        for name, of in (("rows", file), ("broken", broken)):
            hook = {"webhook": f"{receiver.url}/{name}"}
            client.batches.create(input_file_id=of.id, **asked, extra_body=hook)
        with server.http() as http:
            night = http.post("/v1/night", json={"file": file.id, "webhook": f"{receiver.url}/night"})
            assert night.status_code == 202, night.text

        def told() -> bool:
            server.client.courier.look()
            return len(receiver.received) == 3

        wait_until(told)
        told_of = {one.path: json.loads(one.body)["data"] for one in receiver.received}
        batches = {batch.id: batch for batch in client.batches.list().data}
        for data in told_of.values():
            assert batches[data["id"]].status == data["status"]
            assert batches[data["id"]].output_file_id == data["output_file"]
            assert "source" not in data and str(server.client.settings.data_dir) not in json.dumps(data)
        assert told_of["/rows"]["state"] == told_of["/night"]["state"] == "completed"
        assert (told_of["/broken"]["status"], told_of["/broken"]["output_file"]) == ("failed", None)
