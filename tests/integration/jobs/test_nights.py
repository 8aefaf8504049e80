"""The report of a night, from SQL alone: a month later, as a command and as a page."""

import json
from datetime import UTC, date, datetime, timedelta

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.commands.night import describe_night
from nightmill.jobs.reply.night import ModelNight, night_of, shorter
from nightmill.jobs.sql.activity import ActivityStore
from nightmill.jobs.sql.claims import Claims, Outcome
from tests.support.servers import Clock

NIGHT = date(2026, 1, 5)


def test_a_night_is_told_from_sql_a_month_later(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = clock.time = datetime(2026, 1, 5, 22, 0, tzinfo=UTC)
    claims = Claims(client.database, "a" * 32)
    claims.register("mill", 1, "model", "H100")
    activity = ActivityStore(client.database)
    activity.record(claims.worker_id, "model", clock(), clock.advance(minutes=2), {"loading": 120.0})
    for name, wrote in (("short", 10), ("long", 1)):
        batch = client.submit_batch([{"prompt": str(row)} for row in range(10)], name=name)
        for job in client.list_jobs(batch=name, state="queued"):
            (claim,) = claims.claim([job.id])
            clock.advance(minutes=wrote if name == "short" else 20)
            failed = job.row == 3
            claims.finish([
                Outcome(
                    *(job.id, claim.attempt, StopReason.ERROR if failed else StopReason.EOS, "t", 100, wrote),
                    error=f"row {job.row} is too long" if failed else None,
                    cached_tokens=40,
                )
            ])  # fmt: skip
        assert batch.status().state.final
    first = began + timedelta(minutes=2)
    activity.record(claims.worker_id, "model", first, first + timedelta(minutes=10), {"computing": 300.0})
    activity.record(
        *(claims.worker_id, "model", first, first + timedelta(minutes=10)),
        {"computing": 360.0, "messages": 200.0, "tokenizer": 40.0},
    )  # in place of what was said before
    clock.advance(hours=30)
    (late,) = claims.claim([client.enqueue("the next night's")])
    claims.finish([Outcome(late.job_id, late.attempt, StopReason.EOS, "t", 5, 5)])

    clock.advance(days=30)
    report = client.night(NIGHT)
    assert (report.rows, report.began_at, report.seconds) == (20, first, 300 * 60.0)
    assert report.models == [ModelNight(None, 20, 2, 2000, 800, 110, 11)]
    assert [(load.model, load.gpu, load.seconds) for load in report.loads] == [("model", "H100", 120.0)]
    assert (report.slowest and report.slowest.name, report.slowest and report.slowest.seconds) == (
        *("long", 200 * 60.0),
    )
    assert [(group.rows, group.message) for group in report.failures] == [(2, "row 3 is too long")]
    assert report.spent == {
        "computing": 360.0, "memory": 0, "tokenizer": 40.0, "messages": 200.0, "loading": 120.0,
    }  # fmt: skip
    assert [sentence.split(":")[0] for sentence in report.sentences] == [
        "Workers waited 3 min for jobs while the night went on",
        "Models were loaded 1 times, which took 2 min",
        "Workers waited 40 s for prompts to be rendered and tokenised",
    ]
    assert client.night(NIGHT + timedelta(days=1)).rows == 1
    before = client.night(NIGHT - timedelta(days=1))
    assert describe_night(before, before.until - timedelta(seconds=1)).endswith("none ended")
    assert describe_night(before, before.until).endswith("for those since noon: nightmill night 2026-01-05")
    for name, value in (("DATABASE", client.settings.database_url), ("BROKER", client.settings.broker_url)):
        if value:
            monkeypatch.setenv(f"NIGHTMILL_{name}_URL", str(value))
    monkeypatch.setenv("NIGHTMILL_DATA_DIR", str(client.settings.data_dir))
    said = json.loads(CliRunner().invoke(main, ["night", "2026-01-05", "--json"]).stdout)
    assert (said["rows"], said["slowest"]["name"]) == (20, "long")
    shown = CliRunner().invoke(main, ["night", "2026-01-05"]).output
    assert "batch long: 10 rows in 3 h 20 min" in shown and "2 x row 3 is too long" in shown
    assert "is not a date" in CliRunner().invoke(main, ["night", "yesterday"]).output
    client.prune(timedelta(days=3))
    assert client.night(NIGHT).spent["computing"] == 0 and client.night(NIGHT).rows == 0


def test_a_night_begins_at_noon_and_by_default_is_the_last_one() -> None:
    def of(hour: int, day: date | None = None) -> tuple[date, float]:
        found, since, until = night_of(day, datetime(2026, 1, 6, hour).astimezone())
        assert since == datetime.combine(found, datetime.min.time().replace(hour=12)).astimezone()
        return found, (until - since).total_seconds()

    assert [of(hour)[0].day for hour in (3, 11, 12, 17, 18, 23)] == [5, 5, 5, 5, 6, 6]
    assert of(3, date(2026, 1, 1)) == (date(2026, 1, 1), 86_400.0)


def test_what_would_not_have_helped_is_not_said() -> None:
    model = ModelNight("m", 100, 0, 1000, 0, 100_000, 0)
    busy = shorter({"computing": 9_990.0, "loading": 10.0}, [model], 1, 0.0)
    assert len(busy) == 1 and busy[0].startswith("GPUs computed for 100% of the time: only another GPU")
    failing = ModelNight("m", 100, 50, 1_000_000, 0, 100_000, 50_000)
    said = shorter({"computing": 900.0, "memory": 100.0}, [failing], 1, 5.0)
    assert [sentence.split(" ")[0] for sentence in said] == ["About", "For", "GPUs"]
    assert shorter({}, [ModelNight("m", 1, 0, 10, 0, 10, 0)], 0, 0.0) == []
