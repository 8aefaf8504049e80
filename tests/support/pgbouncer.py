"""pgbouncer in transaction mode before a PostgreSQL of the tests."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy.engine import make_url

from tests.support.needs import Need, missing
from tests.support.servers import free_port, postgres_address, scratch_directory, wait_until

PROGRAM = "NIGHTMILL_TEST_PGBOUNCER"
"""Names the program, if it is not on the path."""
_END_SECONDS = 10.0


def program() -> str:
    """The pgbouncer of this machine; skips the test where there is none."""
    found = os.environ.get(PROGRAM) or shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    return found or missing(Need.PGBOUNCER)


@contextmanager
def pgbouncer(database_url: str, *, connections: int = 3) -> Iterator[str]:
    """The URL of a database behind a pooler in transaction mode.

    connections  of the pooler to the server: few, so that each transaction meets another's session
    """
    url, port, executable = make_url(database_url), free_port(), program()
    address = postgres_address(url)
    host, server_port = address if isinstance(address, tuple) else (str(Path(address).parent), 5432)
    password = f" password={url.password}" if url.password else ""
    folder = scratch_directory()  # not below pytest's: another user must be let in
    configuration = folder / "pgbouncer.ini"
    configuration.write_text(
        f"""[databases]
* = host={host} port={server_port} user={url.username}{password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
server_round_robin = 1
default_pool_size = {connections}
min_pool_size = {connections}
max_client_conn = 200
logfile = {folder / "pgbouncer.log"}
""",
        encoding="utf-8",
    )
    folder.chmod(0o777)
    configuration.chmod(0o644)
    # It does not run as root, and must be let in to the server's socket.
    as_other = (
        ["--user", Path(host).owner() if host.startswith("/") else "nobody"] if os.geteuid() == 0 else []
    )
    process = subprocess.Popen(
        [executable, *as_other, str(configuration)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    through = url.set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False)
    try:
        plain = through.replace("postgresql+psycopg://", "postgresql://")
        wait_until(lambda: _answers(plain), what="pgbouncer's first answer")
        yield through
    finally:
        process.kill()
        process.wait(_END_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=2) as connection:
            return connection.execute("SELECT 1").fetchone() is not None
    except psycopg.OperationalError:
        return False
