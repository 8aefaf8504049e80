"""On a GPU: texts that were cut and go on, in other company and another process, have the bits of one go;
answers that are taken over have them, too."""

from pathlib import Path
from typing import Any

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.demo import installed_model
from nightmill.worker.commands.process import running_worker

PATIENCE = 120.0
CUT, WHOLE = 9, 70
TOPICS = ("rain", "a quiet harbor in winter", "snow", "the moon over the mill", "bread", "an old clock")
ASKED: dict[str, Any] = {"seed": 11, "temperature": 0.9, "top_p": 0.95}


def prompts() -> list[str]:
    """Long and short ones, of which some begin alike."""
    return [
        f"{'Write with care. ' * (number % 5)}Write a haiku about {TOPICS[number % len(TOPICS)]} ({number})"
        for number in range(160)
    ]


def texts(batch: Batch) -> dict[int | None, tuple[str | None, int | None, StopReason | None]]:
    """What the rows say."""
    return {job.row: (job.text, job.completion_tokens, job.stop_reason) for job in batch.results()}


def test_extended_and_reused_texts_have_the_bits_of_one_go(sqlite_settings: Settings, tmp_path: Path) -> None:
    model = installed_model() or demo_model()
    settings = sqlite_settings.model_copy(update={"gpu": 0, "model": model, "save_seconds": 0.2})
    with Client(settings) as client:
        with running_worker(client, tmp_path / "first.log"):
            steps = client.submit_batch(prompts(), name="steps", max_tokens=CUT, **ASKED)
            assert steps.wait(timeout=PATIENCE).states == {JobState.SUCCEEDED: 160}
        before = texts(steps)
        cut = [row for row, (_, _, reason) in before.items() if reason is StopReason.LENGTH]
        assert len(cut) > 80
        # Another process, with other rows beside: other slots, pages, launches and shared beginnings.
        with running_worker(client, tmp_path / "second.log"):
            noise = client.submit_batch(prompts()[::-1], name="noise", max_tokens=40, seed=3, priority=6)
            assert steps.extend(WHOLE).rows == len(cut)
            assert steps.wait(timeout=PATIENCE).states == {JobState.SUCCEEDED: 160}
            noise.wait(timeout=PATIENCE)
            resumed = client.workers()[0].stats
            once = client.submit_batch(prompts(), name="once", max_tokens=WHOLE, **ASKED)
            once.wait(timeout=PATIENCE)
            assert texts(steps) == texts(once)
            for row in cut:
                longer, shorter = texts(steps)[row][0], before[row][0]
                assert longer is not None and shorter is not None and longer.startswith(shorter)
            first = client.submit_batch(prompts(), name="a", max_tokens=WHOLE, reuse="exact", **ASKED)
            first.wait(timeout=PATIENCE)
            again = client.submit_batch(prompts(), name="b", max_tokens=WHOLE, reuse="exact", **ASKED)
            again.wait(timeout=PATIENCE)
            assert texts(again) == texts(first) == texts(once)
            taken = {job.row: job.reused_from for job in again.results()}
            assert taken == {job.row: job.id for job in first.results()}
            assert all(not job.gpu_seconds for job in again.results())
            greedy = {"temperature": 0.0, "max_tokens": 20, "reuse": "exact"}
            twins = client.submit_batch(["What is snow?"] * 50, name="twins", **greedy)
            twins.wait(timeout=PATIENCE)
            assert len(set(texts(twins).values())) == 1
            assert sum(job.reused_from is None for job in twins.results()) == 1
    log = (tmp_path / "second.log").read_text()
    assert resumed is not None and "Traceback" not in log
    # It went on from the tokens that were saved.
    (ended,) = (line for line in log.splitlines() if "tokens drawn, " in line)
    assert (
        int(ended.partition("tokens drawn, ")[2].split()[0]) >= CUT * len(cut) * 0.9
    )  # went on from saved ones
