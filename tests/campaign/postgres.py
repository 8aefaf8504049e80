"""The PostgreSQL of a night: restarted in place, suspended, cut off from its clients."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg

from tests.support.servers import PostgresServer, wait_until


class PostgresControl:
    """A running server, and what may be done to it."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        with psycopg.connect(self._dsn(), autocommit=True) as connection:
            # What was acknowledged must survive an immediate shutdown of the server, if not of the machine.
            connection.execute("ALTER SYSTEM RESET synchronous_commit")
            connection.execute("SELECT pg_reload_conf()")
            row = connection.execute("SHOW data_directory").fetchone()
        assert row is not None
        self._directory = Path(row[0])
        process = self._postmaster()
        self._command, self._uid, self._gid = process.cmdline(), process.uids().real, process.gids().real

    def create_database(self) -> str:
        """A new database's URL."""
        return self._server.create_database()

    def set(self, name: str, value: object) -> None:
        """Change a setting of the server, and restart it."""
        with psycopg.connect(self._dsn(), autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        self.restart(signal.SIGINT)

    def restart(self, number: signal.Signals) -> None:
        """SIGINT: fast, as `systemctl restart` does; SIGQUIT: immediate, as after a crash."""
        process = self._postmaster()
        self.go_on()
        process.send_signal(number)
        with suppress(psutil.NoSuchProcess):
            wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, 60, "the end of PostgreSQL")
        with (self._directory / "campaign.log").open("a") as log:
            log.flush()
            subprocess.Popen(
                self._command, cwd="/", user=self._uid if os.getuid() == 0 else None,
                group=self._gid if os.getuid() == 0 else None, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(self._answers, 60, "PostgreSQL's return")

    def drop_connections(self) -> None:
        """End every session but this one."""
        with psycopg.connect(self._dsn(), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    @property
    def socket(self) -> str:
        """The path of its Unix socket."""
        return str(Path(str(self._server.admin_url.query["host"])) / ".s.PGSQL.5432")

    def hang(self) -> None:
        """SIGSTOP of the server and of all of its sessions."""
        postmaster = self._postmaster()
        for process in (postmaster, *postmaster.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def go_on(self) -> None:
        """SIGCONT of all of them."""
        postmaster = self._postmaster()
        for process in (*postmaster.children(recursive=True), postmaster):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def stop(self) -> None:
        """End the server, which is another process than the one that was started first."""
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            self.go_on()
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            self._postmaster().send_signal(signal.SIGQUIT)

    def _postmaster(self) -> psutil.Process:
        return psutil.Process(int((self._directory / "postmaster.pid").read_text().split()[0]))

    def _dsn(self) -> str:
        return self._server.admin_url.set(drivername="postgresql").render_as_string(hide_password=False)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._dsn(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True
