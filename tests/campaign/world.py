"""The servers and the settings of a night under fire, and what may be done to the servers.

Everything of Nightmill's reaches Redis and PostgreSQL through proxies; the campaign itself goes past them.
"""

import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import OperationalError

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from tests.campaign import history, model
from tests.campaign.clocks import PostgresClock
from tests.campaign.disk import Disk
from tests.campaign.plan import SERVERS, STALE
from tests.campaign.postgres import PostgresControl
from tests.campaign.proxies import Proxies
from tests.support.freezing import Freeze
from tests.support.servers import (
    RedisServer,
    free_port,
    start_postgres,
    start_redis,
    worker_env,
)

WORKER = {
    "reference": True,
    "shard_size": 8,
    "max_sequences": 16,
    "heartbeat_seconds": 0.5,
    "stale_seconds": STALE,
    "resend_seconds": 3.0,
    "drain_seconds": 4.0,
    "save_seconds": 0.5,
    "hang_seconds": 20.0,
}
STEP_SECONDS = 0.01
OTHER_MODEL = "letters"
"""The name of a model that one worker has beside the usual one, and loads in turn with it."""
LONGEST_TROUBLE = 75.0  # that a caller may still meet an outage of the database after it
FULL_DISK = "a full disk"
OF_THE_DATABASE = frozenset({"PostgreSQL", "frozen connections to postgres", FULL_DISK})
"""Because of which a caller may be told that the database does not answer."""


class World:
    """A database (`postgresql` or `sqlite`), a Redis, a model file, a small disk, a folder for all of it."""

    def __init__(self, database: str) -> None:
        self.database = database
        self._stack = ExitStack()
        self.trouble_until = 0.0  # the database may fail calls until then
        self.lock: sqlite3.Connection | None = None
        self._redis_lock = threading.Lock()
        self._hanging: set[str] = set()
        self._hung_at = 0.0  # when a server last hung or was away
        self.wrong_clocks: list[tuple[float, float | None]] = []  # from when until when one was wrong

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:  # servers and mounts are not left behind
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="nightmill-campaign-"))
        self.clock = self.home / "clock"
        self.stale_folder = self.home / "folder-is-stale"  # while it exists, the server's files are ESTALE
        self.ports = [free_port() for _ in range(SERVERS)]
        self.disk = self._stack.enter_context(Disk(self.home / "disk"))
        self.files = self.disk.path / "files"
        self.redis: RedisServer = self._stack.enter_context(start_redis(self.home / "redis"))
        targets: dict[str, Any] = {"redis": ("127.0.0.1", self.redis.port)}
        if self.database == "postgresql":
            self.postgres = PostgresControl(self._stack.enter_context(start_postgres()))
            self._stack.callback(self.postgres.stop)
            direct = self.postgres.create_database()
            targets["postgres"] = self.postgres.socket
        else:
            direct = f"sqlite:///{self.disk.path / 'night.db'}"
        self.proxies = self._stack.enter_context(Proxies(targets))
        self.settings = Settings(
            data_dir=self.home / "data", files_dir=self.files, database_url=self._proxied(direct),
            broker_url=f"redis://127.0.0.1:{self.proxies.ports['redis']}/0",
            model=model.write(self.home / "bytes.gguf"), **WORKER,
        )  # fmt: skip
        other = model.write(self.home / f"{OTHER_MODEL}.gguf")
        self.in_turn = ("--models", f"{self.settings.model},{other}", "--stay", "2s")
        with Client(self.settings) as client:
            client.database.migrate()
        self.engine: Engine = create_engine(direct, pool_pre_ping=True)
        history.install(self.engine)
        if self.database == "postgresql":
            self.postgres_clock = PostgresClock(self.engine)

    def __exit__(self, *exc: object) -> None:
        self.engine.dispose()
        self._stack.close()

    def _proxied(self, direct: str) -> str:
        if self.database == "sqlite":
            return direct
        url = make_url(direct).difference_update_query(["host"])
        url = url.set(host="127.0.0.1", port=self.proxies.ports["postgres"])
        return url.render_as_string(hide_password=False)

    @property
    def environment(self) -> dict[str, str]:
        """For workers and clients of their own."""
        mark = {"CAMPAIGN_HOME": str(self.home), "CAMPAIGN_STEP": str(STEP_SECONDS)}
        mark |= {"CAMPAIGN_STALE": str(self.stale_folder), "CAMPAIGN_FILES": str(self.files)}
        if self.database == "sqlite":  # PostgreSQL's clock is everybody's there
            mark["CAMPAIGN_HOST_CLOCK"] = str(self.clock)
        return worker_env(self.settings) | mark

    def trouble(self, seconds: float = LONGEST_TROUBLE) -> None:
        """From now on, for so long, a caller may be told that the database does not answer."""
        self.trouble_until = max(self.trouble_until, time.monotonic() + seconds)

    @property
    def troubled(self) -> bool:
        return time.monotonic() < self.trouble_until or not self._hanging.isdisjoint(OF_THE_DATABASE)

    def sql(self, statement: str, values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """Run a statement of the campaign's own, past any outage; returns its rows."""
        give_up_at = time.monotonic() + 60.0
        while True:
            try:
                with self.engine.begin() as connection:
                    done = connection.execute(text(statement), values or {})
                    return done.all() if done.returns_rows else []
            except OperationalError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.2)

    # -- what hangs --------------------------------------------------------------------------------

    def hangs(self, what: str) -> None:
        """Note that a server hangs, or is away, from now on."""
        self._hanging.add(what)
        self._hung_at = time.monotonic()

    def goes_on(self, what: str) -> None:
        """Note that it does not any more."""
        if what not in self._hanging:
            return
        self._hanging.discard(what)
        self._hung_at = time.monotonic()
        if what in OF_THE_DATABASE:
            self.trouble()

    def hung_since(self, when: float) -> bool:
        """Whether a server hung or was away at any time since then."""
        return bool(self._hanging) or self._hung_at >= when

    @property
    def hanging(self) -> str:
        """What hangs now, in words."""
        return ", ".join(sorted(self._hanging))

    def freeze_connections(self, name: str, how: Freeze, *, new: bool) -> None:
        """Those to `redis` or `postgres`: see tests.support.freezing."""
        self.hangs(f"frozen connections to {name}")
        self.proxies.freeze(name, how, new=new)

    def thaw_connections(self, name: str) -> None:
        """Undo it: they are cut, and new ones work."""
        self.proxies.thaw(name)
        self.goes_on(f"frozen connections to {name}")

    @property
    def postgres_hangs(self) -> bool:
        """Whether the server's processes are stopped: who asks it now waits."""
        return "PostgreSQL" in self._hanging

    def hang_postgres(self) -> None:
        """SIGSTOP."""
        self.hangs("PostgreSQL")
        self.postgres.hang()

    def continue_postgres(self) -> None:
        """SIGCONT."""
        self.postgres.go_on()
        self.goes_on("PostgreSQL")

    def step_clock(self, seconds: float) -> None:
        """Set everybody's clock wrong: the database server's, which is the host's for SQLite."""
        self.wrong_clocks.append((time.time(), None))
        if self.database == "postgresql":
            self.postgres_clock.step(seconds)
        else:
            self.clock.write_text(str(seconds))

    def right_clock(self) -> None:
        """Undo it."""
        if self.database == "postgresql":
            self.postgres_clock.step(0.0)
        else:
            self.clock.unlink(missing_ok=True)
        now = time.time()
        self.wrong_clocks = [(since, until or now) for since, until in self.wrong_clocks]

    def fill_disk(self) -> bool:
        """Leave nothing of the small disk; False where there is none."""
        if self.disk.fill():
            self.hangs(FULL_DISK)
        return self.disk.mounted

    def free_disk(self) -> None:
        """Undo it."""
        self.disk.free()
        self.goes_on(FULL_DISK)

    def folder_goes(self) -> bool:
        """Take the servers' folder of files away; False where it is not there yet."""
        try:
            self.files.rename(self.files.with_name("files-away"))
        except FileNotFoundError:
            return False
        return True

    def folder_returns(self) -> None:
        """Put it back, with what may have been written to another in its place meanwhile."""
        away = self.files.with_name("files-away")
        if not away.exists():
            return
        if self.files.exists():  # somebody has made it anew
            for path in self.files.iterdir():
                path.rename(away / path.name)
            self.files.rmdir()
        away.rename(self.files)

    # -- Redis -------------------------------------------------------------------------------------

    def kill_redis(self) -> None:
        """As kill -9."""
        self.hangs("Redis")
        with self._redis_lock:
            self.redis.stop()

    def revive_redis(self) -> None:
        """Start it where it does not run, continue it where it stands still."""
        with self._redis_lock:
            process = self.redis._process
            if process is None:
                self.redis.start()
            else:
                process.send_signal(signal.SIGCONT)
        self.goes_on("Redis")

    def freeze_redis(self) -> None:
        """SIGSTOP."""
        self.hangs("Redis")
        with self._redis_lock:
            if self.redis._process is not None:
                self.redis._process.send_signal(signal.SIGSTOP)

    # -- SQLite ------------------------------------------------------------------------------------

    def hold_write_lock(self) -> None:
        """Let nobody else write; nothing where a process that was frozen holds the lock already."""
        self.release_write_lock()
        self.lock = sqlite3.connect(
            self.disk.path / "night.db", timeout=0.5, isolation_level=None, check_same_thread=False
        )
        try:
            self.lock.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            self.release_write_lock()

    def release_write_lock(self) -> None:
        """Undo it."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None
