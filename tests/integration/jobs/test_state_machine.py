"""Every transition of a job, by a property-based test: a model in Python against the SQL of Store and Claims.

Hypothesis plays a client, two workers (which fall silent, come back as zombies, and get messages twice) and
time. After each step the tables must say what the model says, and must not have broken a rule that is written
down apart from the model.
"""

from datetime import UTC, datetime

from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.sql.database import Database
from tests.integration.jobs.machine_of_jobs import Jobs
from tests.support.servers import Clock


def test_every_history_keeps_the_rules(server_settings: Settings) -> None:
    clock = Clock(datetime(2026, 1, 1, tzinfo=UTC))
    database = Database(server_settings, clock)
    try:
        run_state_machine_as_test(
            lambda: Jobs(database, clock),  # type: ignore[arg-type]
            settings=hypothesis_settings(
                max_examples=18,
                stateful_step_count=50,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, Phase.shrink],
            ),
        )
    finally:
        database.close()
