"""Shared prefixes in a whole worker: on by default, off by option, the texts the same."""

import re
from pathlib import Path

import pytest

from nightmill.jobs.client.client import Client
from tests.integration.worker.conftest import StartWorker, on_sqlite

SYSTEM = "Write as Basho would, in three lines, without a title. " * 8


# tests/acceptance/test_shared_prefix.py compares texts and counts, unit/worker/test_options.py has options.
@pytest.mark.slow
@on_sqlite
def test_jobs_with_one_system_prompt_share_it_unless_that_is_switched_off(
    jobs_client: Client, start_worker: StartWorker, tmp_path: Path
) -> None:
    texts, figures = {}, {}
    for name, arguments in (("sharing", []), ("alone", ["--no-prefix-sharing"])):
        with start_worker(name, *arguments):
            ids = [
                jobs_client.enqueue(
                    [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Haiku {n}"}],
                    max_tokens=8,
                    seed=n,
                )
                for n in range(6)
            ]
            jobs_client.wait(ids, timeout=120)
        finished = [jobs_client.get(job_id) for job_id in ids]
        texts[name] = [(job.text, job.prompt_tokens, job.completion_tokens) for job in finished]
        counted = re.search(
            r"(\d+) prompt tokens computed, (\d+) shared", (tmp_path / f"{name}.log").read_text()
        )
        assert counted is not None
        figures[name] = tuple(map(int, counted.groups()))
        assert sum(figures[name]) == sum(job.prompt_tokens or 0 for job in finished)
    assert texts["sharing"] == texts["alone"]
    assert figures["alone"][1] == 0
    assert figures["sharing"][0] * 3 < figures["alone"][0]
