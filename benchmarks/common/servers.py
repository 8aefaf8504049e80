"""What benchmarks of the whole path run on: Redis and PostgreSQL of their own, safe as in production."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from tests.support.servers import start_postgres, start_redis


@contextmanager
def durable_client(*, sqlite: bool, **settings: Any) -> Iterator[tuple[Client, Path]]:
    """A client on durable servers (fsync on), migrated, and a directory for the rest; `settings`: of both."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="nightmill-bench-")))
        redis = stack.enter_context(start_redis(home / "redis", durable=True))
        url = None if sqlite else stack.enter_context(start_postgres(durable=True)).create_database()
        chosen = Settings(data_dir=home, database_url=url, broker_url=redis.url, **settings)
        client = stack.enter_context(Client(chosen))
        client.database.migrate()
        yield client, home
