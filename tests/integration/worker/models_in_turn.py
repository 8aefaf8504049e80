"""Rows for several models, the loads of their workers, and the texts that each model gives alone."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from sqlalchemy import select

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.tables import LoadRow
from nightmill.worker.assembly.engine import build_engine
from nightmill.worker.assembly.model import load_model, open_model
from nightmill.worker.engine.request import Request
from tests.support.engines import complete

PATIENCE = 120.0
PROMPTS = (  # of rows 0 to 3, and so on
    "Write a haiku about rain",
    "Describe a quiet harbor",
    "What is snow?",
)


def loads(client: Client) -> list[tuple[str, bool]]:
    """Return every load, in order: the model, and whether it became ready."""
    query = select(LoadRow.model, LoadRow.ready_at).order_by(LoadRow.id)
    with client.database.read() as connection:
        return [(model, ready is not None) for model, ready in connection.execute(query)]


def ask(client: Client, prompt: str, model: str, seed: int) -> str:
    return client.enqueue(prompt, model=model, seed=seed, max_tokens=12, ignore_eos=True)


def texts_alone(file: Path, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Return the texts that an engine on one model gives, where no other model was ever loaded."""
    settings = Settings(model=file, reference=True)
    model = load_model(settings)
    params = GenerationParams(max_tokens=12, ignore_eos=True)
    with closing(model), closing(build_engine(settings, open_model(settings))) as engine:
        requests = [
            Request(str(number), 1, model.encode(PROMPTS[number // 4]), params, seed=number)
            for _, number in keys
        ]
        done = complete(engine, requests)
    return {key: done[str(key[1])].text for key in keys}
