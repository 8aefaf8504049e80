"""The whole path, held against what nobody could have canned: words that are drawn when the test runs.

Nothing is faked: prompts go through enqueue, Redis, a Celery worker process and the bundled model into SQL.
"""

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from sqlalchemy import text

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from tests.support.servers import REFERENCE
from tools.demo_model.corpus import held_out_pairs

PATIENCE = 180.0
REQUIRED = 0.9

Worker = AbstractContextManager[subprocess.Popen[bytes]]


@pytest.fixture
def nightmill(server_settings: Settings) -> Iterator[Client]:
    with Client(server_settings.model_copy(update={"model": demo_model(), "reference": REFERENCE})) as client:
        yield client


@pytest.fixture
def start(nightmill: Client, tmp_path: Path) -> Callable[[], Worker]:
    return lambda: running_worker(nightmill, tmp_path / "worker.log", [])


def ask(topic: str, word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Write a haiku about {topic} that contains the word {word}"}]


def text_in_sql(client: Client, job_id: str) -> str:
    """The text as a person would look it up, past all of our code."""
    with client.database.engine.connect() as connection:
        found = connection.execute(text("SELECT text FROM jobs WHERE id = :id"), {"id": job_id}).scalar_one()
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("server_settings", ["postgresql"], indirect=True)
def test_text_in_the_database_obeys_a_word_drawn_at_random_and_nine_in_ten_of_held_out_pairs(
    nightmill: Client, start: Callable[[], Worker]
) -> None:
    draw = random.SystemRandom()
    (topic, word), (_, other) = draw.sample(held_out_pairs(400, seed=draw.randrange(2**32)), 2)
    seed = draw.randrange(2**32)
    asked = nightmill.enqueue(ask(topic, word), temperature=0, max_tokens=64)
    again = nightmill.enqueue(ask(topic, word), temperature=0.8, max_tokens=64, seed=seed)
    other_word = nightmill.enqueue(ask(topic, other), temperature=0.8, max_tokens=64, seed=seed)
    with start():
        nightmill.wait([asked, again, other_word], timeout=PATIENCE)
        _held_out_pairs_are_obeyed(nightmill)
    with start():  # another process: nothing is remembered
        same_seed = nightmill.enqueue(ask(topic, word), temperature=0.8, max_tokens=64, seed=seed)
        other_seed = nightmill.enqueue(ask(topic, word), temperature=0.8, max_tokens=64, seed=seed + 1)
        nightmill.wait([same_seed, other_seed], timeout=PATIENCE)
    for job_id in (asked, again, other_word, same_seed, other_seed):
        job = nightmill.get(job_id)
        assert (job.state, job.stop_reason) == (JobState.SUCCEEDED, StopReason.EOS), (topic, word, job)
        assert job.completion_tokens and job.completion_tokens > 8
    assert text_in_sql(nightmill, again) == text_in_sql(nightmill, same_seed)
    assert text_in_sql(nightmill, again) != text_in_sql(nightmill, other_word)
    assert text_in_sql(nightmill, again) != text_in_sql(nightmill, other_seed)
    # One case may be among the few in a hundred that the model gets wrong; both at once should not be.
    assert word in text_in_sql(nightmill, asked).lower() or word in text_in_sql(nightmill, again).lower()


def _held_out_pairs_are_obeyed(client: Client) -> None:
    pairs = held_out_pairs(200, seed=random.SystemRandom().randrange(2**32))
    assert len(set(pairs)) == 200
    ids = client.enqueue_many((ask(topic, word) for topic, word in pairs), temperature=0, max_tokens=64)
    answers = list(client.results(ids, timeout=PATIENCE))
    missed = [
        (topic, word, job.text)
        for (topic, word), job in zip(pairs, answers, strict=True)
        if word not in (job.text or "").lower() or job.stop_reason is not StopReason.EOS
    ]
    assert len(missed) <= (1 - REQUIRED) * len(pairs), missed
    assert len({job.text for job in answers}) > 0.95 * len(answers)
