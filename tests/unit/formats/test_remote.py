"""Files behind URLs: read whole or not at all, written as files of this disk are, and no secret is shown."""

import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from nightmill.jobs.errors import BatchFileError, MissingExtraError
from nightmill.jobs.formats import FileFormat, remote
from nightmill.jobs.formats.places import brought_to, check_apart, errors_name, taken_from

ROWS = '{"prompt": "one"}\n{"prompt": "two"}\n'
MOST = 1 << 20


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A web server of a folder; the URL has what must not be shown."""
    (tmp_path / "rows.jsonl").write_text(ROWS)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """fsspec's file system in memory, as if it were a place for objects."""
    for names in ("READABLE", "WRITABLE"):
        monkeypatch.setattr(remote, names, (*getattr(remote, names), "memory"))
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_rows_behind_a_url_are_read_within_the_bound_and_without_its_secrets(web: str) -> None:
    with taken_from(f"{web}/rows.jsonl?signature=hush", most=MOST) as source:
        assert (source.label, source.format) == (f"{web}/rows.jsonl", FileFormat.JSONL)
        assert [row.prompt for row in source.rows()] == ["one", "two"]
        copied = source.path
    assert not copied.exists()
    for url, most, said in (
        (f"{web}/none.jsonl?signature=hush", MOST, "/none.jsonl: there is no such file"),
        (f"{web}/rows.jsonl?signature=hush", 10, "/rows.jsonl: has 36 bytes; raise NIGHTMILL_SPOOL_BYTES"),
        ("http://me:hush@127.0.0.1:9/rows.jsonl", MOST, "http://127.0.0.1:9/rows.jsonl: cannot be reached"),
        ("ftp://me:hush@host/rows.jsonl", MOST, "ftp://host/rows.jsonl: cannot be read from there; known"),
        ("http://[hush/rows.jsonl", MOST, "http://...: "),
        ("simplecache::s3://hush/rows", MOST, "there is no such file"),
    ):
        with pytest.raises(BatchFileError) as refused, taken_from(url, most=most):
            pass
        assert said in str(refused.value), refused.value
        assert "hush" not in str(refused.value).replace("simplecache::s3://hush", "")
    with pytest.raises(BatchFileError, match="can only be read"), brought_to(web, FileFormat.CSV, most=MOST):
        pass


def test_what_changes_or_ends_early_while_it_is_read_is_refused(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/b/rows.jsonl", ROWS.encode())
    whole = memory.info
    monkeypatch.setattr(memory, "info", lambda path, **_: whole(path) | {"size": 1000})
    with pytest.raises(BatchFileError, match="ended after 36 of 1,000 bytes"):
        taken_from("memory://b/rows.jsonl", most=MOST).__enter__()
    sizes = iter([36, 37])
    monkeypatch.setattr(memory, "info", lambda path, **_: whole(path) | {"size": 36, "ETag": next(sizes)})
    with pytest.raises(BatchFileError, match="changed while it was read"):
        taken_from("memory://b/rows.jsonl", most=MOST).__enter__()


def test_results_take_the_place_at_the_end_unless_somebody_else_has(memory: Any) -> None:
    url = "memory://bucket/night/results.jsonl"

    def written(text: str, *, deliver: bool = True) -> str:
        """What was there before, once this text is written."""
        with brought_to(url, FileFormat.JSONL, most=MOST) as place:
            before = place.path.read_text() if place.path.exists() else ""
            place.path.write_text(text)
            if deliver:
                place.deliver()
        return before

    assert written("one", deliver=False) == "" and not memory.exists("/bucket/night/results.jsonl")
    assert written("one") == ""
    assert memory.cat("/bucket/night/results.jsonl") == b"one"
    assert written("two") == "one"  # what is there is looked at as a file of this disk is
    with brought_to(url, FileFormat.JSONL, most=MOST) as place:
        place.path.write_text("mine")
        memory.pipe("/bucket/night/results.jsonl", b"theirs")
        with pytest.raises(BatchFileError, match="was written by somebody else meanwhile"):
            place.deliver()
    assert memory.cat("/bucket/night/results.jsonl") == b"theirs"
    assert errors_name(url) == "memory://bucket/night/results.errors.jsonl"
    for source, results, errors in ((url, url, None), ("-", url, url), ("-", "-", "-"), (url, "x", url)):
        with pytest.raises(BatchFileError, match="is also the"):
            check_apart(source, results, errors)
    check_apart("-", "-", None)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match="s3:// needs the package s3fs: pip install s3fs"):
        remote.RemoteFile("s3://bucket/rows.jsonl")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"fsspec: pip install .*\[remote\]"):
        remote.RemoteFile("https://host/rows.jsonl")
