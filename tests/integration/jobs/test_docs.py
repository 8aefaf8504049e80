"""What the documentation tells people to type works."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.sql.claims import Claims, Outcome
from tests.support.servers import worker_env

DOCS = Path(__file__).parents[3] / "docs"
SQL = re.findall(r"^```sql\n(.*?)^```", (DOCS / "reading-results-with-sql.md").read_text(), re.M | re.S)
MONTHS = (DOCS / "running-for-months.md").read_text()
CRON = [
    line for block in re.findall(r"^```crontab\n(.*?)^```", MONTHS, re.M | re.S) for line in block.split("\n")
]


@pytest.fixture
def client(server_settings: Settings, tmp_path: Path) -> Any:
    """A batch in which something has happened."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"custom_id": "q-1", "prompt": "one"}\n{"prompt": 2}\n{"prompt": "three", "n": 2}\n{"prompt": "4"}\n'
    )
    with Client(server_settings) as client:
        batch = client.submit_batch(path, name="tonight")
        claims = Claims(client.database, "a" * 32)
        claims.register("host", 1, "model", None)
        ids = [job.id for job in client.list_jobs(state="queued")]
        for claim in claims.claim(ids[:2]):
            reason = StopReason.EOS if claim.prompt == "one" else StopReason.LENGTH
            answers = tuple(Answer("text", reason, 1, number) for number in range(claim.params.n))
            claims.finish([Outcome(claim.job_id, claim.attempt, reason, "text", 1, 2, answers=answers)])
        assert batch.status().rows == 4
        yield client


@pytest.mark.parametrize("number", range(len(SQL)))
def test_every_query_runs_and_finds_something(client: Client, number: int) -> None:
    with client.database.read() as connection:
        rows = connection.execute(text(SQL[number])).all()
    tried_twice = "attempt > 1" in SQL[number]
    assert bool(rows) is not tried_twice
    assert len(SQL) == 9


def cron(line: str, tmp_path: Path, settings: Settings) -> "subprocess.CompletedProcess[str]":
    """Run a line as cron does: with /bin/sh, without its five fields, in an empty environment."""
    command = line.split(maxsplit=5)[5]
    assert "%" not in command.replace("\\%", "")  # cron would end the command there
    exports = tmp_path / "env.sh"
    environment = worker_env(settings)
    exports.write_text(
        "".join(f"export {name}='{value}'\n" for name, value in environment.items() if "NIGHTMILL" in name)
        + f"export PYTHONPATH='{os.environ.get('PYTHONPATH', '')}'\n"
    )
    for theirs, ours in (
        ("/etc/nightmill.env.sh", str(exports)),
        ("/opt/nightmill/bin/nightmill", f"{sys.executable} -m nightmill"),
        ("/srv/", f"{tmp_path}/"),
        ("/var/log/", f"{tmp_path}/"),
        ("\\%", "%"),
    ):
        command = command.replace(theirs, ours)
    return subprocess.run(
        ["/bin/sh", "-c", command],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_the_crontab_lines_work_and_may_come_twice(sqlite_settings: Settings, tmp_path: Path) -> None:
    submit, prune = [line for line in CRON if line]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    for _ in range(2):
        done = cron(submit, tmp_path, sqlite_settings)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), (
            tmp_path / "nightmill-submit.log"
        ).read_text()
    with Client(sqlite_settings) as client:
        (batch,) = client.list_batches()
        assert re.fullmatch(r"night-\d{4}-\d\d-\d\d", batch.name)
        assert batch.record.scheduled_at is not None and batch.record.deadline_at is not None
        assert len(client.list_jobs()) == 1
    assert cron(prune, tmp_path, sqlite_settings).returncode == 0
    assert (tmp_path / "nightmill-prune.log").read_text() == "0 jobs and 0 batches deleted\n"


def test_the_celery_beat_example_submits_a_batch_once_a_night(
    sqlite_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```", MONTHS, re.M | re.S)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    for name, value in worker_env(sqlite_settings).items():
        monkeypatch.setenv(name, value)
    scope: dict[str, Any] = {"__name__": "nightly"}
    exec(source, scope)  # the documentation's own code
    names = {scope["submit"].run(str(prompts)) for _ in range(2)}
    entry = scope["app"].conf.beat_schedule["submit"]
    assert entry["task"] in scope["app"].tasks
    assert entry["schedule"].is_due(scope["app"].now()).next > 0
    with Client(sqlite_settings) as client:
        assert {batch.name for batch in client.list_batches()} == names
        assert len(client.list_jobs()) == 1
