"""Files: uploaded and read with OpenAI's own client, within limits, and never found by strangers."""

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import openai
import pytest

from nightmill.jobs.base.ids import IdSource
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.server import bodies
from nightmill.jobs.server.files import PREFIX
from nightmill.jobs.server.folder import Folder
from nightmill.jobs.server.forms import MultipartForm
from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.sql.files import FileStore, StoredFile
from tests.support.servers import wait_until
from tests.unit.server.conftest import ALICE, BOB, EVE, KEYS, OPS, Server, listening


def folder_of(server: Server) -> list[str]:
    return sorted(path.name for path in server.client.settings.resolved_files_dir.iterdir())


def form(*parts: tuple[str, bytes], boundary: str = "b") -> bytes:
    """The body of a form: (headers of the part, its content)."""
    made = [b"--%s\r\n%s\r\n\r\n%s\r\n" % (boundary.encode(), head.encode(), data) for head, data in parts]
    return b"".join(made) + f"--{boundary}--\r\n".encode()


PURPOSE = ('Content-Disposition: form-data; name="purpose"', b"batch")
FILE = 'Content-Disposition: form-data; name="file"; filename="a.jsonl"'
KIND = {"Content-Type": "multipart/form-data; boundary=b"}


def test_a_file_is_kept_shown_read_and_deleted_by_its_owner(start: Callable[..., Any]) -> None:
    content = os.urandom(3_000_000)
    with start(worker=False) as server:
        client = server.openai()
        file = client.files.create(file=("night.jsonl", content), purpose="batch")
        assert (file.object, file.bytes, file.filename, file.purpose, file.status, file.expires_at) == (
            "file", len(content), "night.jsonl", "batch", "processed", None,
        )  # fmt: skip
        assert abs(file.created_at - time.time()) < 60
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).read() == content
        raw = client.files.with_raw_response.content(file.id)
        assert (raw.headers["content-length"], raw.headers["x-content-type-options"]) == (
            "3000000",
            "nosniff",
        )
        with client.files.with_streaming_response.content(file.id) as answer:
            assert b"".join(answer.iter_bytes()) == content
        with listening(server.client, KEYS) as port:  # another server beside it
            beside = client.with_options(base_url=f"http://127.0.0.1:{port}/v1")
            assert beside.files.content(file.id).read() == content
        assert folder_of(server) == [file.id.removeprefix(PREFIX)]

        async def program() -> None:
            async with server.openai_async() as client:
                ids = [
                    (await client.files.create(file=("x", b"%d" % number), purpose="batch")).id
                    for number in range(4)
                ]
                newest_first = [one.id async for one in client.files.list(limit=2)]
                assert newest_first == [*reversed(ids), file.id]
                assert [one.id async for one in client.files.list(limit=2, order="asc")] == [file.id, *ids]
                page = await client.files.list(limit=3, after=ids[1], order="asc")
                assert (page.has_more, [one.id for one in page.data]) == (False, ids[2:])
                assert [one.id async for one in client.files.list(purpose="batch_output")] == []
                gone = await asyncio.gather(*(client.files.delete(one) for one in [file.id, *ids]))
                assert [(one.id, one.deleted) for one in gone] == [(one, True) for one in [file.id, *ids]]

        asyncio.run(program())
        assert folder_of(server) == []
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match=f"no file has the id '{file.id}'"):
                call(file.id)


def test_strangers_find_nothing_and_readers_change_nothing(start: Callable[..., Any]) -> None:
    with start(worker=False) as server:
        file = server.openai().files.create(file=("a", b"mine"), purpose="batch")
        for forged in (file.id, "file-" + "0" * 32, "file-..%2F..%2Fdata", "x", file.id.removeprefix(PREFIX)):
            with server.http(BOB) as http:
                for method, rest in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                    answer = http.request(method, f"/v1/files/{forged}{rest}")
                    assert answer.status_code == 404, (method, forged)
                    assert str(server.client.settings.data_dir) not in answer.text
        assert list(server.openai(BOB).files.list()) == []
        eve = server.openai(EVE)
        assert eve.files.content(file.id).read() == b"mine"
        assert [one.id for one in eve.files.list()] == [file.id]
        for call in (lambda: eve.files.delete(file.id), lambda: eve.files.create(file=b"x", purpose="batch")):
            with pytest.raises(openai.PermissionDeniedError, match="may only read"):
                call()
        assert server.openai(OPS).files.delete(file.id).deleted
        with server.http(None) as http:
            assert http.get("/v1/files").status_code == http.post("/v1/files").status_code == 401
        with server.http() as http:
            for query in ({"limit": "0"}, {"limit": "10001"}, {"after": "x"}, {"order": "up"}):
                assert http.get("/v1/files", params=query).status_code == 400


def test_names_of_strangers_are_shown_and_never_paths(start: Callable[..., Any]) -> None:
    names = {
        "../../etc/passwd": "passwd",
        "/abs/olute.jsonl": "olute.jsonl",
        "C:\\temp\\x.jsonl": "x.jsonl",
        "..": "..",
        "/": "file",
        "a\u202eb\x7f": "a\\u202eb\\x7f",
        "é" * 300: "é" * 254 + "…",
    }
    with start(worker=False) as server, server.http() as http:
        for given, shown in names.items():
            disposition = f'Content-Disposition: form-data; name="file"; filename="{given}"'
            answer = http.post("/v1/files", content=form((disposition, b"x"), PURPOSE), headers=KIND)
            assert (answer.status_code, answer.json()["filename"]) == (200, shown)
            name = answer.json()["id"].removeprefix(PREFIX)
            assert name in folder_of(server) and len(name) == 32
    outside = {path.name for path in server.client.settings.data_dir.parent.iterdir()}
    assert not outside & {"passwd", "x", "olute.jsonl"}


MULTIPART = "multipart/form-data; boundary=b"
EXPIRY = 'Content-Disposition: form-data; name="expires_after[seconds]"'
BAD_FORMS = [
    ("application/json", b"{}", 415, "multipart/form-data"),
    ("multipart/form-data", b"", 415, "boundary="),
    ("multipart/form-data; boundary=" + "b" * 300, b"", 400, "Boundary length"),
    (MULTIPART, b"", 400, "ended too early"),
    (MULTIPART, b"nonsense", 400, "not a form that can be read"),
    (MULTIPART, form((FILE, b"x"))[:-4], 400, "ended too early"),
    (MULTIPART, form((FILE, b"x")), 400, "purpose: is missing"),
    (MULTIPART, form(PURPOSE), 400, "file: is missing"),
    (MULTIPART, form((FILE, b""), PURPOSE), 400, "file: is empty"),
    (MULTIPART, form((FILE, b"x"), (FILE, b"y"), PURPOSE), 400, "more than one file"),
    (MULTIPART, form(PURPOSE, PURPOSE, (FILE, b"y")), 400, "the name of another"),
    (MULTIPART, form((FILE.partition("; file")[0], b"x")), 400, "has no filename"),
    (MULTIPART, form((PURPOSE[0], b"x" * 2000)), 400, "more than 1,024 bytes"),
    (MULTIPART, form((f"{FILE}\r\nX: {'y' * 9000}", b"x")), 400, "header size"),
    (MULTIPART, form((FILE, b"x"), PURPOSE, (EXPIRY, b"1")), 400, "expires_after[seconds]: is not supported"),
    (MULTIPART, form(*[(f'{PURPOSE[0][:-1]}{n}"', b"") for n in range(99)]), 400, "more than 16 parts"),
]


def test_forms_that_are_none_leave_nothing(start: Callable[..., Any]) -> None:
    with start(worker=False) as server, server.http() as http:
        for kind, body, status, said in BAD_FORMS:
            answer = http.post("/v1/files", content=body, headers={"Content-Type": kind})
            assert answer.status_code == status, (body, answer.text)
            assert said in answer.json()["error"]["message"]
        assert folder_of(server) == []
        assert http.get("/v1/files").json()["data"] == []


def test_a_form_is_the_same_however_it_is_cut() -> None:
    chance = random.Random(5)
    for _ in range(200):
        boundary = "".join(chance.choices("ab-", k=chance.randint(1, 9)))
        content = "".join(chance.choices(["\r", "\n", "-", "--", "\r\n--", boundary, "a"], k=60)).encode()
        if f"\r\n--{boundary}".encode() in b"\r\n" + content:
            continue
        body = form(PURPOSE, (FILE, content), boundary=boundary)
        made = MultipartForm(f'multipart/form-data; boundary="{boundary}"')
        got, at = bytearray(), 0
        while at < len(body):
            step = chance.choice([1, 2, 3, 40])
            made.feed(body[at : at + step])
            got += made.take()
            at += step
        assert (bytes(got), made.over, made.texts, made.filename) == (
            content, True, {"purpose": "batch"}, "a.jsonl",
        )  # fmt: skip


def test_limits_of_a_file_and_of_a_key(start: Callable[..., Any]) -> None:
    limits = ServerLimits(file_bytes=1_000_000, stored_bytes=2_000_000, keep_files=timedelta(days=1))
    with start(worker=False, limits=limits) as server:
        client = server.openai()
        with pytest.raises(openai.APIStatusError, match="a file may have 1,000,000 bytes") as caught:
            client.files.create(file=("a", b"x" * 1_000_001), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (413, "too_large")
        first = client.files.create(file=("a", b"x" * 1_000_000), purpose="batch")
        assert first.expires_at == first.created_at + 86_400
        client.files.create(file=("b", b"x" * 900_000), purpose="batch")
        for retries in (0, 2):  # the client is told not to try again
            with pytest.raises(openai.RateLimitError, match="2,000,000 bytes together") as refused:
                server.openai(max_retries=retries).files.create(file=("c", b"x" * 200_000), purpose="batch")
            assert refused.value.code == "quota_exceeded"
        server.openai(BOB).files.create(file=("c", b"x" * 200_000), purpose="batch")
        client.files.delete(first.id)
        client.files.create(file=("c", b"x" * 200_000), purpose="batch")
        assert len(folder_of(server)) == 3


def test_an_upload_that_is_too_large_or_slow_or_lost_leaves_nothing(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = form((FILE, b"x" * 1000))[:900]
    endless = b"186a0\r\n" + begin + b"y" * (100_000 - len(begin)) + b"\r\n"
    with start(worker=False, limits=ServerLimits(file_bytes=1_000_000)) as server:
        port = int(server.url.rpartition(":")[2])
        for length, sent, answered in (
            ("Content-Length: 99999999999", b"", b"HTTP/1.1 413 "),
            ("Transfer-Encoding: chunked", endless * 12, b"HTTP/1.1 413 "),
            ("Content-Length: 100000", begin, b""),
            ("Content-Length: 100000", begin, b"HTTP/1.1 408 "),
        ):
            monkeypatch.setattr(bodies, "BODY_SECONDS", 0.3 if b"408" in answered else 60.0)
            head = ["POST /v1/files HTTP/1.1", "Host: localhost", f"Authorization: Bearer {ALICE}"]
            head += [f"Content-Type: {KIND['Content-Type']}", length]
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + sent)
                if answered:
                    assert connection.recv(100).startswith(answered)
                else:
                    wait_until(lambda: folder_of(server))
            wait_until(lambda: not folder_of(server))
        assert server.http().get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("blind", [False, True])
def test_an_upload_whose_row_is_in_doubt_is_removed_unless_the_row_is_there(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, done: bool, blind: bool
) -> None:
    """The database goes away while the row is entered, and, if `blind`, while it is looked for."""
    real = FileStore.add

    def add(self: FileStore, *args: Any) -> bool:
        if done:
            real(self, *args)
        raise DatabaseUnreachableError("the database is away")

    def get(self: FileStore, file_id: str) -> StoredFile | None:
        raise DatabaseUnreachableError("the database is away")

    with start(worker=False) as server:
        upload = server.openai().files.create
        with monkeypatch.context() as away:
            away.setattr(FileStore, "add", add)
            if blind:
                away.setattr(FileStore, "get", get)
            with pytest.raises(openai.InternalServerError, match="the database cannot be used now"):
                upload(file=("a.jsonl", b"first"), purpose="batch")
            assert len(folder_of(server)) == int(done or blind)
        upload(file=("b.jsonl", b"second"), purpose="batch")
        listed = {file.id.removeprefix(PREFIX): file.filename for file in server.openai().files.list()}
        assert sorted(listed.values()) == (["a.jsonl", "b.jsonl"] if done else ["b.jsonl"])
        assert {name.removesuffix(".coming") for name in folder_of(server)} == listed.keys()
        for file_id, filename in listed.items():
            content = server.openai().files.content(PREFIX + file_id).read()
            assert content == (b"first" if filename == "a.jsonl" else b"second")


def test_contents_without_rows_go_after_a_day_and_no_others(sqlite_settings: Settings) -> None:
    with Client(sqlite_settings) as client:
        store, folder = FileStore(client.database), Folder(sqlite_settings.resolved_files_dir)
        old, fresh, crashed, whole = (IdSource().draw() for _ in range(4))
        for file_id in (old, fresh, crashed):
            folder.coming(file_id).write_bytes(b"x")
        folder.coming(whole).write_bytes(b"x")
        folder.settle(whole)
        (folder.path / "other.coming").write_bytes(b"x")
        long_ago = time.time() - 90_000
        for path in folder.path.iterdir():
            if path != folder.coming(fresh):
                os.utime(path, (long_ago, long_ago))
        # Its server died between the row and the name.
        assert store.add(StoredFile(crashed, None, "batch", "c", 1, client.database.now()), 10)
        assert folder.sweep(store.known) == 1
        left = {path.name for path in folder.path.iterdir()}
        assert left == {f"{fresh}.coming", f"{crashed}.coming", whole, "other.coming"}
        with folder.open(crashed) as content:
            assert content.read() == b"x"
        with pytest.raises(ValueError, match="an id that was drawn here"):
            folder.find("../x")


def test_the_quota_holds_for_files_that_come_at_once(server_settings: Settings) -> None:
    with Client(server_settings) as client:
        store, ids = FileStore(client.database), IdSource()
        now = client.database.now()
        files = [StoredFile(ids.draw(), "alice", "batch", "\ud800\x00", 10, now) for _ in range(20)]
        with ThreadPoolExecutor(8) as pool:
            kept = list(pool.map(lambda file: store.add(file, 100), files))
        assert (sum(kept), store.used("alice"), store.used(None)) == (10, 100, 0)
        left = store.page(owner="alice", purpose=None, after=None, oldest_first=True, limit=99)
        assert len(left) == 10

        def broken() -> None:
            raise OSError("the disk is away")

        with pytest.raises(OSError, match="disk"):
            store.delete(left[0].id, broken)
        assert store.get(left[0].id) == left[0]
        assert store.delete(left[0].id, lambda: None) and not store.delete(left[0].id, lambda: None)
