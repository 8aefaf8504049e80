"""No thread waits without end: a call that may block has a limit, or a line that says what bounds it."""

import tomllib
from pathlib import Path

import pytest

from nightmill import package_directory
from tests.support.blocking import blocking_calls

ROOT = package_directory()
TABLE: dict[str, dict[str, str]] = tomllib.loads(
    (Path(__file__).parent / "blocking_calls.toml").read_text(encoding="utf-8")
)


def _found() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for part in ("jobs", "worker"):
        for path in sorted((ROOT / part).rglob("*.py")):
            for one in blocking_calls(ROOT, path):
                module, _, function = one.place.partition(" ")
                if not any(module.startswith(name) for name in TABLE if name.endswith("/")):
                    found.setdefault(module, set()).add(f"{function} {one.call}")
    return found


def test_every_call_that_may_block_has_a_limit_or_a_reason() -> None:
    found, listed = _found(), {module: set(lines) for module, lines in TABLE.items() if lines}
    unlisted = [f"{module}: {one}" for module in found for one in found[module] - listed.get(module, set())]
    assert unlisted == [], "give it a time limit, or say in blocking_calls.toml what bounds it"
    gone = [f"{module}: {one}" for module in listed for one in listed[module] - found.get(module, set())]
    assert gone == [], "blocking_calls.toml lists what is not there any more"


@pytest.mark.parametrize(
    ("code", "called"),
    [
        ("thread.join()", ["thread.join"]),
        ("thread.join(5.0)", []),
        ("thread.join(timeout=None)", ["thread.join"]),
        ("', '.join(names)", []),
        ("self.over.wait()", ["self.over.wait"]),
        ("self.over.wait(timeout)", []),
        ("changed.wait_for(lambda: x)", ["changed.wait_for"]),
        ("changed.wait_for(lambda: x, 2.0)", []),
        ("queue.get()", ["queue.get"]),
        ("queue.get(timeout=None if a else b)", ["queue.get"]),
        ("queue.get(timeout=1.0)", []),
        ("values.get(name)", []),
        ("lock.acquire()", ["lock.acquire"]),
        ("lock.acquire(timeout=-1 if a is None else a)", ["lock.acquire"]),
        ("lock.acquire(blocking=False)", []),
        ("future.result()", ["future.result"]),
        ("connection.recv()", ["connection.recv"]),
        ("selector.poll(None)", ["selector.poll"]),
        ("select.select(a, b, c)", ["select.select"]),
        ("select.select(a, b, c, None)", ["select.select"]),
        ("select.select(a, b, c, 2.0)", []),
        ("os.read(pipe, 5)", ["os.read"]),
        ("process.communicate(said)", ["process.communicate"]),
        ("process.communicate(said, timeout=5)", []),
        ("subprocess.run(command)", ["subprocess.run"]),
        ("subprocess.run(command, timeout=5)", []),
        ("fcntl.flock(file, fcntl.LOCK_EX)", ["fcntl.flock"]),
        ("fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", []),
        ("redis.Redis(host)", ["redis.Redis"]),
        ("redis.Redis(host, socket_timeout=5)", []),
        ("socket.create_connection(address)", ["socket.create_connection"]),
        ("socket.create_connection(address, 5)", []),
        ("create_engine(url)", ["create_engine"]),
        ("threading.Lock()", ["threading.Lock"]),
        ("threading.Thread(target=run)", ["threading.Thread"]),
        ("threading.Thread(target=run, daemon=True)", []),
        ("pool.shutdown()", ["pool.shutdown"]),
        ("pool.shutdown(wait=False)", []),
    ],
)
def test_what_may_block_is_found(tmp_path: Path, code: str, called: list[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"def f():\n    {code}\n")
    assert [one.call for one in blocking_calls(tmp_path, path)] == called


def test_what_is_awaited_holds_no_thread(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("async def f():\n    await event.wait()\n")
    assert list(blocking_calls(tmp_path, path)) == []
