"""What a worker says that it spends its time on, by a stepped clock."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from nightmill.jobs.client.client import Client
from nightmill.jobs.sql.activity import ActivityStore
from nightmill.worker.service.activity import Activity
from tests.support.servers import Clock

IDLE = {"running": 0, "waiting": 0, "free_pages": 100, "pages": 100, "sequences": 8}


@pytest.mark.parametrize(
    ("stats", "idle", "kind"),
    [
        ({}, True, "messages"),
        ({}, False, "tokenizer"),
        ({"running": 8, "waiting": 5}, False, "computing"),  # all sequences are in use
        ({"running": 4, "waiting": 5}, False, "computing"),  # they have just arrived
        ({"running": 4, "waiting": 5, "free_pages": 3}, False, "memory"),
        ({"running": 4, "free_pages": 3}, False, "computing"),
    ],
)
def test_time_is_counted_for_what_the_worker_does(
    sqlite_client: Client, clock: Clock, stats: dict[str, int], idle: bool, kind: str
) -> None:
    activity, _ = made(sqlite_client, stats, idle=idle)
    for _ in range(90):
        clock.advance(1)
        activity.look()
    (spell,) = ActivityStore(sqlite_client.database).between(clock() - timedelta(hours=1), clock())
    assert getattr(spell, kind) == 60.0 and spell.ended_at - spell.began_at == timedelta(seconds=60)
    assert spell.computing + spell.memory + spell.tokenizer + spell.messages == 60.0


def test_rows_cover_ten_minutes_and_no_time_in_which_nothing_is_known(
    sqlite_client: Client, clock: Clock
) -> None:
    activity, service = made(sqlite_client, {}, idle=True)
    began = clock()
    for second in range(1000):
        if second == 700:
            service.engine.stats.running = 1
            clock.advance(minutes=30)  # the machine was suspended
        clock.advance(1)
        activity.look()
    activity.write()
    spells = ActivityStore(sqlite_client.database).between(began, clock())
    assert [(spell.messages, spell.computing) for spell in spells] == [(600, 0), (100, 0), (0, 299)]
    assert all(spell.ended_at - spell.began_at <= timedelta(minutes=10) for spell in spells)


def made(client: Client, stats: dict[str, int], *, idle: bool) -> tuple[Activity, Any]:
    service: Any = SimpleNamespace(
        engine=SimpleNamespace(stats=SimpleNamespace(**IDLE | stats)), in_flight=SimpleNamespace(idle=idle)
    )
    return Activity(ActivityStore(client.database), "a" * 32, "model", service), service
