"""What is said of batches that wait, of files in other formats, and of errors that a list leaves out."""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from nightmill.jobs.base.contract import WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.server import validating
from nightmill.jobs.sql.claims import Claims
from tests.support.servers import wait_until
from tests.unit.server.browser import Browser
from tests.unit.server.conftest import Server
from tests.unit.server.openai_batches import PLAIN, ended, row, submit

Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def server(start: Start, looks_often: None) -> Any:
    """A server without keys and without a worker, that looks for batches often."""
    with start(keys=None, worker=False) as server:
        yield server


def serve(client: Client, model: str) -> Claims:
    claims = Claims(client.database, "c" * 32)
    claims.register("host", 1, model, None)
    claims.beat(WorkerState.READY)
    return claims


def upload(server: Server, name: str, content: bytes) -> str:
    with server.http(None) as http:
        answer = http.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


def night(server: Server, name: str, content: bytes, **more: Any) -> str:
    with server.http(None) as http:
        answer = http.post("/v1/night", json={"file": upload(server, name, content)} | more)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])


def shown(server: Server, batch: str) -> dict[str, Any]:
    with server.http(None) as http:
        found: dict[str, Any] = http.get(f"/v1/night/{batch}").json()
        return found


def test_a_batch_that_waits_for_a_model_that_nobody_serves_says_so_and_its_file_has_a_name(
    server: Server,
) -> None:
    worker, client = serve(server.client, "gone"), server.openai()
    batch = submit(client, row("a", model="gone"), metadata={"about": "the moon"})
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    assert client.batches.retrieve(batch.id).errors is None
    worker.sign_off()
    (error,) = client.batches.retrieve(batch.id).errors.data
    assert (error.code, error.line) == ("delayed", None)
    assert re.fullmatch(
        r"no live worker serves 'gone': rows wait for one; unless one comes, they expire [0-9: -]+ UTC",
        error.message,
    )
    assert shown(server, batch.id)["note"] == error.message
    browser = Browser(server)
    page = browser.get("/batch", name=batch.id).text
    assert "no live worker serves &#39;gone&#39;" in page and "about: the moon" in page
    assert "<h1>night.jsonl</h1>" in page and f"<code>{batch.id}</code>" in page and "Deadline" in page
    tonight = browser.get("/").text
    assert ">night.jsonl</a>" in tonight and f">{batch.id}</a>" not in tonight
    assert "no worker serves it" in tonight
    client.batches.cancel(batch.id)
    assert ended(client, batch).errors is None
    assert "<dt>Deadline</dt>" not in browser.get("/batch", name=batch.id).text  # of what has ended


def test_lists_of_errors_say_how_many_they_leave_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validating, "_MOST_ERRORS", 2)
    client = server.openai()
    kinds = "abcdefghijkl"
    batch = ended(client, submit(client, *(row(f"r{kind}", **{f"{kind}_{kind}": 1}) for kind in kinds)))
    *named, last = batch.errors.data
    assert (len(named), last.code, last.line) == (2, "more_errors", None)
    assert last.message == "10 more rows cannot be run; the error file names all of them"
    found = shown(server, batch.id)
    assert found["bad_rows"][-1]["code"] == "more_errors"
    assert found["unlisted_errors"] == 12 - sum(group["rows"] for group in found["errors"]) == 2
    page = Browser(server).get("/batch", name=batch.id).text
    assert "and <b>2</b> rows with other errors" in page


def test_a_file_without_rows_has_failed_wherever_one_looks(server: Server) -> None:
    batch = night(server, "empty.jsonl", b"\n\n \n")
    found = wait_until(lambda: (now := shown(server, batch))["status"] == "failed" and now)
    assert (found["state"], found["rows"]) == ("failed", 0)
    assert found["bad_rows"][0]["message"] == "holds no rows; write one row on each line"
    page = Browser(server).get("/batch", name=batch).text
    assert 'is-failed">failed' in page and "is-cancelled" not in page and "holds no rows" in page
    assert server.client.get_batch(batch).status().state == "failed"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.csv", b"prompt\nOnce\n", "is CSV, .* POST /v1/night takes CSV"),
        ("rows.bin", b"PAR1....", "is Parquet, .* POST /v1/night takes Parquet"),
    ],
)
def test_what_takes_another_format_is_named(server: Server, name: str, content: bytes, said: str) -> None:
    client, file = server.openai(), upload(server, name, content)
    batch = client.batches.create(input_file_id=file, endpoint=PLAIN, completion_window="24h")
    (error,) = ended(client, batch).errors.data
    assert error.line is None and re.search(said, error.message)


def test_plain_rows_among_those_of_openai_are_told_where_they_belong(server: Server) -> None:
    client = server.openai()
    batch = ended(client, submit(client, {"prompt": "Once"}, {"custom_id": "b", "messages": []}))
    assert [error.line for error in batch.errors.data] == [1, 2]
    for error, key in zip(batch.errors.data, ("prompt", "messages"), strict=True):
        assert error.message.startswith(f"{key}: is a key of plain rows") and error.param == key
        assert error.message.endswith("hand a file of plain rows in with POST /v1/night")
    other = json.dumps(row("a")).encode()
    batch = night(server, "rows.jsonl", b'{"prompt": "p"}\n' + other + b"\n")
    (bad,) = wait_until(lambda: shown(server, batch)["bad_rows"])
    assert bad["line"] == 2 and bad["message"].startswith("body: is a key of OpenAI's rows")
