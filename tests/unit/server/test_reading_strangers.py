"""What servers read of strangers: bodies off the event loop, files by the endings of their names."""

import gzip
import io
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pyarrow
import pytest
from pyarrow import parquet

from nightmill.jobs.server import bodies
from nightmill.jobs.server.inputs import EndpointFile
from nightmill.jobs.server.pages import checking
from tests.support.servers import wait_until
from tests.unit.server.conftest import ALICE, BOB, Server

JSON = {"Content-Type": "application/json"}


pytestmark = pytest.mark.usefixtures("looks_often")


def upload(http: httpx2.Client, name: str, content: bytes) -> httpx2.Response:
    return http.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, content)})


def night(http: httpx2.Client, name: str, content: bytes) -> dict[str, Any]:
    """The batch of a file, once it has ended."""
    file = upload(http, name, content).json()["id"]
    made = http.post("/v1/night", json={"file": file, "max_tokens": 4}).json()
    wait_until(lambda: http.get(f"/v1/batches/{made['id']}").json()["status"] in ("completed", "failed"))
    found: dict[str, Any] = http.get(f"/v1/batches/{made['id']}").json()
    return found


# -- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "thread"), [(1_000, "Thread"), (16 << 10, "bodies"), (200_000, "bodies")])
def test_bodies_from_16_kib_on_are_read_off_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, size: int, thread: str
) -> None:
    seen = []
    real = bodies.parse_object

    def parse(body: Any) -> Any:
        seen.append(threading.current_thread().name)
        return real(body)

    monkeypatch.setattr(bodies, "parse_object", parse)
    body = b'{"prompt": "Once", "max_tokens": 1, "none": 1'.ljust(size - 1) + b"}"
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/jobs", "/v1/generate", "/v1/night"):
            assert http.post(path, content=body, headers=JSON).status_code == 400
    assert len(seen) == 5
    assert all(name.startswith(thread) for name in seen), seen


def test_who_holds_too_many_bytes_is_asked_to_come_again_and_others_are_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "HELD_OF_ONE", 100_000)
    go = threading.Event()
    begun = threading.Semaphore(0)
    real = bodies.parse_object

    def parse(body: Any) -> Any:
        if b"wait" in body:
            begun.release()
            assert go.wait(120)
        return real(body)

    monkeypatch.setattr(bodies, "parse_object", parse)
    body = b'{"wait": 1'.ljust(59_999) + b"}"
    with server.http() as http, server.http(BOB) as other, ThreadPoolExecutor(1) as pool:
        held = pool.submit(http.post, "/v1/jobs", content=body, headers=JSON)
        assert begun.acquire(timeout=120)
        busy = httpx2.post(
            f"{server.url}/v1/jobs", content=body, headers={**JSON, "Authorization": f"Bearer {ALICE}"}
        )
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "busy")
        assert int(busy.headers["retry-after"]) > 0
        large = b'{"prompt": "x"'.ljust(59_999) + b"}"
        assert other.post("/v1/jobs", content=large, headers=JSON).status_code == 202
        go.set()
        assert held.result(120).status_code == 400
        assert (
            http.post("/v1/jobs", content=large, headers=JSON).status_code == 202
        )  # nothing is held any more


def test_bodies_that_were_refused_or_broken_off_are_not_held(server: Server) -> None:
    holder = bodies.Bodies()
    holder._hold("a", 10)
    holder._let_go("a", 10)
    assert not holder._held
    with pytest.raises(bodies.HttpError, match="try again later"):
        holder._hold("a", bodies.HELD_OF_ONE + 1)
    assert not holder._held["a"]


def test_messages_show_the_beginning_of_what_they_quote(server: Server) -> None:
    body = json.dumps({"prompt": "x", "k" * 500_000: 1})
    with server.http() as http:
        answer = http.post("/v1/jobs", content=body, headers=JSON)
        assert answer.status_code == 400
        assert len(answer.content) < 5_000
        late = http.post("/v1/jobs", json={"prompt": "x", "deadline": "1" * 500_000})
        assert (late.status_code, len(late.content) < 500) == (400, True)


# -- formats -------------------------------------------------------------------------------------


def table(**columns: list[Any]) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


CSV = b'prompt,custom_id,metadata\n"{ Once, upon",a,"{""n"": 1}"\nTwice,b,\n'


@pytest.mark.parametrize("name", ["excel.csv", "ROWS.CSV", "rows.tsv", "rows.parquet", "rows.pq", "rows"])
def test_a_file_has_the_format_that_its_name_says_and_so_have_the_results(server: Server, name: str) -> None:
    content = CSV
    if name.endswith("tsv"):
        content = b"prompt\tcustom_id\n{ Once, upon\ta\nTwice\tb\n"
    elif name == "excel.csv":
        content = "\ufeffprompt;custom_id\r\n{ Once, upon;a\r\nTwice;b\r\n".encode()
    elif not name.lower().endswith("csv"):
        content = table(prompt=["{ Once, upon", "Twice"], custom_id=["a", "b"])
    with server.http() as http:
        batch = night(http, name, content)
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        output = http.get(f"/v1/files/{batch['output_file_id']}").json()["filename"]
        results = http.get(f"/v1/files/{batch['output_file_id']}/content").content
    if name.lower().endswith(("csv", "tsv")):
        assert output.endswith("output.csv")
        names = b"\xef\xbb\xbfcustom_id;id;text;" if name == "excel.csv" else b"custom_id,id,text,"
        assert results.startswith(names) and results.count(b"\n") == 3
    else:
        assert output.endswith("output.parquet")
        assert parquet.read_table(io.BytesIO(results))["custom_id"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize("name", ["rows.csv.gz", "rows.jsonl"])
def test_gzip_is_refused_when_it_is_uploaded(server: Server, name: str) -> None:
    with server.http() as http:
        answer = upload(http, name, gzip.compress(CSV))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_format")
        assert "gzip" in answer.json()["error"]["message"]
        assert http.get("/v1/files").json()["data"] == []


def test_a_file_of_no_known_format_is_told_what_can_be_done_over_http(server: Server) -> None:
    with server.http() as http:
        batch = night(http, "rows.txt", b"hello\n")
        (error,) = batch["errors"]["data"]
        assert batch["status"] == "failed"
        assert error["message"] == "has no known format; name it .jsonl, .csv, .tsv or .parquet"


def test_parquet_without_pyarrow_fails_the_batch(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    content = table(prompt=["Once"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with server.http() as http:
        batch = night(http, "rows.parquet", content)
        assert batch["status"] == "failed"
        assert "pyarrow is not installed" in batch["errors"]["data"][0]["message"]


# -- the page that shows what a file holds -------------------------------------------------------


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Readings stop at their third row until `go` is set; `rows` are those that were given."""
    state: dict[str, Any] = {"go": threading.Event(), "rows": 0, "begun": 0, "threads": set()}
    real = EndpointFile.rows

    def rows(self: EndpointFile, *defaults: Any) -> Iterator[Any]:
        state["begun"] += 1
        state["threads"].add(threading.current_thread().name)
        for number, row in enumerate(real(self, *defaults)):
            while number == 2 and not state["go"].wait(0.05):
                state["rows"] += 1
                yield row
            state["rows"] += 1
            yield row

    monkeypatch.setattr(EndpointFile, "rows", rows)
    yield state
    state["go"].set()


def test_a_page_waits_for_one_reading_and_statements_for_none(
    alone: Server, reading: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_PATIENCE", 0.3)
    content = b'{"prompt": "x"}\n' * 5
    with alone.http(None) as http, ThreadPoolExecutor(12) as pool:
        file = upload(http, "a.jsonl", content).json()["id"]
        asked = [
            pool.submit(httpx2.get, f"{alone.url}/hand-in/file?id={file}", timeout=240) for _ in range(12)
        ]
        pages = [one.result(240) for one in asked]
        assert {page.status_code for page in pages} == {200}
        assert all("is being read" in page.text and 'http-equiv="refresh"' in page.text for page in pages)
        assert http.get("/v1/jobs").status_code == 200  # though more ask than there are database threads
        reading["go"].set()
        wait_until(lambda: "can be run" in http.get(f"/hand-in/file?id={file}").text)
        assert "can be run" in http.get(f"/hand-in/file?id={file}").text
        assert reading["begun"] == 1  # it is remembered
        assert all(name.startswith("checking") for name in reading["threads"])


def test_a_reading_ends_when_the_browser_goes_and_begins_anew_when_one_comes(
    alone: Server, reading: dict[str, Any]
) -> None:
    with alone.http(None) as http:
        file = upload(http, "a.jsonl", b'{"prompt": "x"}\n' * 5).json()["id"]
        with pytest.raises(httpx2.TimeoutException):
            httpx2.get(f"{alone.url}/hand-in/file?id={file}", timeout=0.5)

        def stands() -> bool:
            before = reading["rows"]
            time.sleep(0.5)
            return bool(before == reading["rows"])

        wait_until(stands, what="the end of the reading")
        reading["go"].set()
        assert "Hand in 5 rows" in http.get(f"/hand-in/file?id={file}").text
        assert reading["begun"] == 2


def test_a_file_that_could_not_be_read_is_read_again(alone: Server) -> None:
    with alone.http(None) as http:
        file = upload(http, "a.jsonl", b'{"prompt": "x"}\n' * 5).json()["id"]
        content = alone.client.settings.resolved_files_dir / file.removeprefix("file-")
        content.rename(content.with_suffix(".away"))
        assert "there is no such file" in http.get(f"/hand-in/file?id={file}").text
        content.with_suffix(".away").rename(content)
        assert "Hand in 5 rows" in http.get(f"/hand-in/file?id={file}").text


def test_a_reading_has_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "content"
    path.write_bytes(b'{"prompt": "' + b"x" * 1_000 + b'"}\n')
    monkeypatch.setattr(checking, "_MOST_BYTES", 100_000)
    assert checking.check(path, "a.jsonl").whole
    path.write_bytes(path.read_bytes() * 10_000)
    found = checking.check(path, "a.jsonl")
    assert not found.whole
    assert found.rows < 500
