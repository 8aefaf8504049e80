"""What rows cost: written with their ends, added up over attempts, shown with their batch, in old files."""

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import update

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.commands.printing import describe_cost, describe_status
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats.layout import Layout
from nightmill.jobs.formats.ours import ForeignFileError, job_ids
from nightmill.jobs.formats.output import ResultFile
from nightmill.jobs.formats.parquet import ParquetWriter
from nightmill.jobs.formats.results import COSTS, LATER, RESULT_COLUMNS
from nightmill.jobs.formats.rows import FileFormat
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.queue_stats import QueueStats
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from nightmill.jobs.tables.into import UsersTable
from tests.support.servers import worker_env

BEFORE = [name for name in RESULT_COLUMNS if name not in LATER]


def worker(client: Client) -> Claims:
    claims = Claims(client.database, "a" * 32)
    claims.register("host", 1, "model", None)
    return claims


def end(claims: Claims, job_id: str, seconds: float | None, joules: float | None, **said: object) -> Job:
    (claim,) = claims.claim([job_id])
    reason = StopReason.ERROR if "error" in said else StopReason.EOS
    outcome = Outcome(
        job_id,
        claim.attempt,
        reason,
        "text",
        3,
        4,
        gpu_seconds=seconds,
        energy_joules=joules,
        **said,  # type: ignore[arg-type]
    )
    assert claims.finish([outcome]) == 1
    with Client(claims.database.settings) as client:
        return client.get(job_id)


def test_a_row_has_what_all_its_attempts_cost_that_ended(client: Client) -> None:
    claims = worker(client)
    (job_id,) = client.enqueue_many(["a"])
    failed = end(claims, job_id, 0.5, 100.0, error="no")
    assert (failed.state, failed.gpu_seconds, failed.energy_joules) == (JobState.FAILED, 0.5, 100.0)
    client.retry(job_id)
    done = end(claims, job_id, 0.25, 50.0)
    assert (done.state, done.gpu_seconds, done.energy_joules) == (JobState.SUCCEEDED, 0.75, 150.0)
    # Seconds alone where the GPU does not tell, and nothing where nothing was computed.
    seconds, nothing, told = client.enqueue_many(["b", "c", "d"])
    assert (end(claims, seconds, 2.0, None).energy_joules, client.get(seconds).gpu_seconds) == (None, 2.0)
    assert (end(claims, nothing, None, None).gpu_seconds, client.get(nothing).energy_joules) == (None, None)
    end(claims, told, None, None, error="its template refuses it")
    assert client.get(told).gpu_seconds is None


def test_a_row_that_is_handed_back_keeps_what_it_cost(client: Client) -> None:
    claims = worker(client)
    first, second, lost = client.enqueue_many(["a", "b", "c"])
    keys = [(claim.job_id, claim.attempt) for claim in claims.claim([first, second, lost])]
    assert claims.hand_back(keys[:2], {keys[0]: (1.5, 300.0), keys[2]: (9.0, 9.0)}) == [first, second]
    assert claims.hand_back([(lost, 7)], {(lost, 7): (9.0, 9.0)}) == []  # it is not of this attempt
    assert (client.get(first).gpu_seconds, client.get(second).gpu_seconds) == (1.5, None)
    assert client.get(lost).gpu_seconds is None
    done = end(claims, first, 0.5, None)
    assert (done.gpu_seconds, done.energy_joules, done.attempt) == (2.0, 300.0, 2)


def test_a_batch_says_what_its_rows_cost_and_monitoring_what_all_did(client: Client) -> None:
    claims = worker(client)
    ids = client.enqueue_many(["a", "b", "c"], batch="night", model="model")
    for job_id in ids[:2]:
        end(claims, job_id, 1800.0, 1.8e6)
    status = client.get_batch("night").status()
    assert (status.gpu_seconds, status.energy_joules, status.energy_kwh) == (3600.0, 3.6e6, 1.0)
    assert status.joules_per_token == 3.6e6 / 8
    assert "cost       1.00 GPU hours, 1.000 kWh, 450,000 J a token" in describe_status(status)
    assert "J a token, 0.32 at 0.32 a kWh" in describe_status(status, 0.32)
    ended = QueueStats(client.database).ended()["model", "succeeded"]
    assert (ended.gpu_seconds, ended.energy_joules) == (3600.0, 3.6e6)
    empty = client.enqueue_many(["a"], batch="waiting")
    assert empty and "cost" not in describe_status(client.get_batch("waiting").status())


def test_the_price_of_a_batch_is_asked_for_or_set(sqlite_settings: Settings) -> None:
    env = worker_env(sqlite_settings) | {"NIGHTMILL_PRICE_PER_KWH": "0.5"}
    with Client(sqlite_settings) as client:
        claims = worker(client)
        (job_id,) = client.enqueue_many(["a"], batch="night")
        end(claims, job_id, 10.0, 7.2e6)
    run = CliRunner()
    assert "1.00 at 0.5 a kWh" in run.invoke(main, ["batch", "status", "night"], env=env).stdout
    asked = run.invoke(main, ["batch", "status", "night", "--price-per-kwh", "0.25"], env=env).stdout
    assert "10.0 GPU seconds, 2.000 kWh, 1,800,000 J a token, 0.50 at 0.25 a kWh" in asked
    told = json.loads(run.invoke(main, ["batch", "status", "night", "--json"], env=env).stdout)
    assert (told["gpu_seconds"], told["energy_kwh"], told["energy_price"]) == (10.0, 2.0, 1.0)
    shown = run.invoke(main, ["show", job_id], env=env).stdout.splitlines()
    costs = [line.split() for line in shown if line.startswith(COSTS)]
    assert [(name, float(value)) for name, value in costs] == [
        ("gpu_seconds", 10.0),
        ("energy_joules", 7.2e6),
    ]
    assert describe_cost(1.0, 0.001, None) == "1.0 GPU seconds, 1.000 Wh"


@pytest.mark.parametrize("delimiter", ["\n", "\r\n"])
def test_a_csv_of_an_earlier_version_is_known_and_keeps_its_columns(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "out.csv"
    path.write_bytes(f"{','.join(BEFORE)}{delimiter}a,{'1' * 32},text,eos,1,2,3,,,,{delimiter}".encode())
    layout = Layout(FileFormat.CSV)
    assert list(job_ids(path, FileFormat.CSV, errors=False, layout=layout)) == ["1" * 32]
    assert list(layout.columns) == BEFORE
    with ResultFile(path, FileFormat.CSV, append=True, layout=layout) as file:
        file.write(dict.fromkeys(RESULT_COLUMNS, 7) | {"id": "2" * 32})
    assert list(job_ids(path, FileFormat.CSV, errors=False)) == ["1" * 32, "2" * 32]
    new = tmp_path / "new.csv"
    with ResultFile(new, FileFormat.CSV) as file:
        file.write(dict.fromkeys(RESULT_COLUMNS, 7) | {"id": "2" * 32})
    assert new.read_text().splitlines()[0].split(",") == list(RESULT_COLUMNS)
    assert list(job_ids(new, FileFormat.CSV, errors=False)) == ["2" * 32]
    for foreign in (f"{','.join(BEFORE)},more\n", ",".join(BEFORE[:-1]) + "\n"):
        path.write_text(foreign)
        with pytest.raises(ForeignFileError):
            list(job_ids(path, FileFormat.CSV, errors=False))


def test_a_users_table_of_an_earlier_version_keeps_its_columns(tmp_path: Path) -> None:
    for columns, lacks in ((BEFORE, None), (list(RESULT_COLUMNS), None), (BEFORE[:-1], "tool_calls")):
        path = tmp_path / f"{len(columns)}.db"
        with closing(sqlite3.connect(path)) as database:
            listed = ", ".join(f'"{name}"' for name in columns)
            database.execute(f'CREATE TABLE results ({listed}, PRIMARY KEY ("id"))')
            database.commit()
        layout = Layout(FileFormat.PARQUET)
        target = UsersTable(f"sqlite:///{path}#results")
        if lacks is not None:
            with pytest.raises(BatchFileError, match=f"lacks the column '{lacks}'"):
                target.write([], layout)
            continue
        assert target.write([], layout) == 0 and list(layout.columns) == columns


def test_lines_and_parquet_of_an_earlier_version_are_known(tmp_path: Path) -> None:
    row = dict.fromkeys(BEFORE) | {"id": "1" * 32, "seed": 1}
    lines = tmp_path / "out.jsonl"
    plain = {
        name: value
        for name, value in row.items()
        if name not in ("answers", "content", "reasoning", "tool_calls")
    }
    lines.write_text(
        f"{json.dumps(plain)}\n{json.dumps(plain | {'gpu_seconds': 1.0, 'energy_joules': None})}\n"
    )
    assert list(job_ids(lines, FileFormat.JSONL, errors=False)) == ["1" * 32] * 2
    for name, columns in (("old.parquet", BEFORE), ("new.parquet", list(RESULT_COLUMNS))):
        writer = ParquetWriter(tmp_path / name, {column: RESULT_COLUMNS[column] for column in columns}, name)
        writer.write([row])
        writer.close()
        assert list(job_ids(tmp_path / name, FileFormat.PARQUET, errors=False)) == ["1" * 32]


def test_what_died_with_a_worker_is_told_as_not_known(client: Client) -> None:
    claims, sweep = worker(client), Sweep(client.database)
    batch = client.submit_batch(["a", "b", "c"], name="night", seed=3)
    ids = list(batch.store.ids("night", JobState.QUEUED))
    assert len(claims.claim(ids)) == 3
    assert sweep.bury(claims.worker_id, blame=True) == 3  # in two halves
    with client.database.write() as connection:
        connection.execute(update(JobRow).values(suspects=None))
    assert [claim.attempt for claim in claims.claim(ids[2:])] == [2]
    assert sweep.bury(claims.worker_id, blame=True) == 1  # alone, and charged
    assert len(claims.claim(ids[:1])) == 1
    assert sweep.bury(claims.worker_id, blame=False) == 1
    (claim,) = claims.claim(ids[:1])
    assert claims.hand_back([(claim.job_id, claim.attempt)], {(claim.job_id, claim.attempt): (0.5, None)})
    status = batch.status()
    assert (status.uncounted_attempts, status.gpu_seconds) == (5, 0.5)
    assert "not known  what 5 attempts cost that ended with a worker" in describe_status(status)
    assert asdict(status)["uncounted_attempts"] == 5
