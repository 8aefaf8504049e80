"""Programs that fork after they have used a client: gunicorn with preload, prefork pools, multiprocessing."""

import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

import psutil  # type: ignore[import-untyped]
import pytest

from nightmill.jobs.base.forking import Turnstile
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.streams.pieces import START
from tests.support.servers import wait_until

CHILDREN = 6
EACH = 30
SECONDS = 60  # after which a child that hangs is ended


def fork(work: Callable[[], list[str]]) -> tuple[int, int]:
    """Run `work` in a child; (its process id, where the lines that it returns can be read)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run(work, write)
    os.close(write)
    return child, read


def _run(work: Callable[[], list[str]], write: int) -> NoReturn:
    """Leave by os._exit: what pytest would do at its end belongs to the parent."""
    signal.alarm(SECONDS)
    lines = ["nothing was returned"]
    try:
        lines = work()
    except BaseException as error:
        lines = [f"{type(error).__name__}: {error}"]
    finally:
        os.write(write, "\n".join(lines).encode())
        os._exit(0)


def said_by(child: int, read: int) -> list[str]:
    """The lines that a child returned, once it has ended."""
    with os.fdopen(read) as pipe:
        lines = pipe.read().split("\n")
    _, status = os.waitpid(child, 0)
    assert status == 0, f"a child ended with {status}: it hung, or crashed"
    return lines


def test_children_and_parent_enqueue_at_the_same_time(server_settings: Settings) -> None:
    """Before the fork the parent has used its connections to both servers, and goes on using them."""
    with Client(server_settings) as client:
        before = [client.enqueue("parent"), client.enqueue("parent")]
        assert len(client.list_jobs()) == 2

        def work() -> list[str]:
            ids = [client.enqueue("child") for _ in range(EACH)]
            assert client.get(ids[0]).prompt == "child"
            return ids

        children = [fork(work) for _ in range(CHILDREN)]
        before += [client.enqueue("parent") for _ in range(EACH)]
        ids = [job_id for child in children for job_id in said_by(*child)]
        assert [line for line in ids if len(line) != 32] == []
        jobs = {job.id: job.prompt for job in client.list_jobs(limit=1000)}
        assert jobs == dict.fromkeys(ids, "child") | dict.fromkeys(before, "parent")
        assert len(jobs) == CHILDREN * EACH + EACH + 2
        assert client.broker.queue_length(None) == len(jobs)


@pytest.mark.parametrize("held", ["database", "broker", "ids"])
def test_a_lock_that_another_thread_holds_at_the_fork_does_not_stop_the_child(
    sqlite_settings: Settings, held: str
) -> None:
    with Client(sqlite_settings) as client:
        lock = {
            "database": client.database._schema_lock,
            "broker": client.broker._lock,
            "ids": client.enqueueing._ids._lock,
        }[held]
        has_it, release = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                has_it.set()
                release.wait(SECONDS)

        thread = threading.Thread(target=hold)
        thread.start()
        assert has_it.wait(SECONDS)
        child = fork(lambda: [client.enqueue("child")])
        try:
            (job_id,) = said_by(*child)
        finally:
            release.set()
            thread.join()
        assert client.get(job_id).prompt == "child"


def test_a_fork_waits_for_a_transaction_of_another_thread(
    sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's locks belong to a process: a child that inherited an open file would believe to have them."""
    with Client(sqlite_settings) as client:
        database_file = str(client.database.engine.url.database)
        client.enqueue("parent")
        began, finish = threading.Event(), threading.Event()

        def write() -> None:
            with client.database.write() as connection:
                connection.exec_driver_sql("UPDATE jobs SET prompt = 'changed'")
                began.set()
                finish.wait(SECONDS)

        thread = threading.Thread(target=write)
        thread.start()
        assert began.wait(SECONDS)
        close = Turnstile.close
        monkeypatch.setattr(Turnstile, "close", lambda *given: (finish.set(), close(*given)))

        def open_files() -> list[str]:
            return [file.path for file in psutil.Process().open_files()]

        inherited = said_by(*fork(open_files))
        thread.join()
        assert [path for path in inherited if path.startswith(database_file)] == []
        assert [job.prompt for job in client.list_jobs()] == ["changed"]


def test_children_draw_other_ids_than_their_parent_also_where_its_clock_went_back(
    sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids then count on from the last one, which parent and children have in common."""
    with Client(sqlite_settings) as client:
        client.enqueueing._ids.draw()
        monkeypatch.setattr("nightmill.jobs.base.ids.time.time_ns", lambda: 1)
        drawn = [client.enqueueing._ids.draw, *[lambda: client.enqueueing._ids.draw()] * 2]
        ids = [said_by(*fork(lambda draw=draw: [draw()]))[0] for draw in drawn]  # type: ignore[misc]
        ids.append(client.enqueueing._ids.draw())
    assert len(set(ids)) == 4


def test_a_child_reads_streams_of_its_own_beside_its_parents(sqlite_settings: Settings) -> None:
    with Client(sqlite_settings) as client:
        ended, running = client.enqueue("ended"), client.enqueue("running")
        client.cancel(ended)
        with client.following.reading(running, START, lambda: None):
            wait_until(lambda: client.following._readers)
            (said,) = said_by(*fork(lambda: [repr(list(client.stream(ended, timeout=SECONDS)))]))
            assert said == "[]"
            assert list(client.stream(ended, timeout=SECONDS)) == []
            assert len(client.following._readers) == 1
