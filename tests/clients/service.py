"""Servers for clients: `nightmill serve` with one worker, NumPy and a small model behind it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.worker.commands.process import running_worker
from tests.clients.tokenizer_folder import write_tokenizer
from tests.support.servers import http_server, start_redis

KEY = "a-key-of-the-clients-tests"
REAL = "smollm2-135m-instruct"
TINY = "tiny"


@dataclass(frozen=True)
class Service:
    """A running server: `url` is without `/v1`; `folder` has the model's tokenizer, as clients read it."""

    url: str
    model: str
    folder: Path
    settings: Settings


@contextmanager
def serving(folder: Path, model: Path, name: str, key: str | None = KEY) -> Iterator[Service]:
    """A server that asks for a key, as one for other machines does, and a worker with `model` under `name`.

    The templates of small models know no tools: so the worker tells of them as JSON.
    """
    folder.mkdir(parents=True)
    write_tokenizer(model, folder / "tokenizer")
    with start_redis(folder / "redis") as redis:
        settings = Settings(
            data_dir=folder / "data",
            database_url=f"sqlite:///{folder / 'nightmill.db'}",
            broker_url=redis.url,
            model=model,
            reference=True,
        )
        arguments = ["--name", name, "--tool-format", "json"]
        with Client(settings) as client:
            client.database.migrate()
            with running_worker(client, folder / "worker.log", arguments):
                served = settings.model_copy(update={"model": None, "reference": False})
                keys = {"NIGHTMILL_API_KEYS": f"clients={key}"} if key else {}
                with http_server(served, folder / "server.log", keys) as url:
                    yield Service(url, name, folder / "tokenizer", served)
