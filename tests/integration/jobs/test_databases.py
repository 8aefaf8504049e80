"""A query as an input, and a table of a database for results: on PostgreSQL and on SQLite."""

from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import create_engine, text

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.tables.databases import UsersDatabase
from nightmill.jobs.tables.queries import rows_of
from nightmill.worker.assembly.model import demo_model
from tests.support.servers import worker_env

QUERY = "SELECT id, review, price, day, ok FROM reviews WHERE review NOT LIKE '%:none' ORDER BY id"
ROWS = 1200


class Theirs:
    """A database of the user's."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = create_engine(url)

    def run(self, statement: str, *rows: Any) -> list[Any]:
        with self.engine.begin() as connection:
            result = connection.execute(text(statement), rows[0] if rows else None)
            return list(result.all()) if result.returns_rows else []


@pytest.fixture
def theirs(request: pytest.FixtureRequest, server_settings: Settings, tmp_path: Path) -> Iterator[Theirs]:
    if "postgresql" in str(server_settings.database_url):
        url = str(request.getfixturevalue("empty_postgres_url"))
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    else:
        (tmp_path / "theirs.db").touch()
        url = f"sqlite:///{tmp_path}/theirs.db"
    made = Theirs(url)
    made.run(
        "CREATE TABLE reviews (id BIGINT, review TEXT, price NUMERIC(8, 2), day DATE, ok BOOLEAN, spare TEXT)"
    )
    made.run(
        "INSERT INTO reviews (id, review, price, day, ok) VALUES (:id, :review, 1.50, '2026-01-02', TRUE)",
        [{"id": number, "review": f"review {number}"} for number in range(ROWS)]
        + [{"id": ROWS, "review": "x:none"}],
    )
    yield made
    made.engine.dispose()


@pytest.fixture
def run(server_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in worker_env(server_settings).items():
        monkeypatch.setenv(name, value)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["batch", *arguments])

    return invoke


def work(client: Client, text_of: Any = "text \x00".__add__) -> None:
    """End all rows that are queued."""
    claims = Claims(client.database, "a" * 32)
    claims.register("host", 1, "model", None)
    while claimed := claims.claim([job.id for job in client.list_jobs(state="queued", limit=500)]):
        claims.finish(
            [
                Outcome(one.job_id, one.attempt, StopReason.EOS, text_of(str(one.params.seed)), 3, 4)
                for one in claimed
            ]
        )


def test_the_rows_of_a_query_become_a_batch_and_its_results_a_table(
    theirs: Theirs, run: Any, server_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--query", QUERY, "--from", theirs.url, "--template", "Judge: {{ review }}", "--column", "label")
    for _ in range(2):  # the same rows again are the same batch
        done = run("submit", *asked, "--json")
        assert done.exit_code == 0, done.output
    with Client(server_settings) as client:
        (batch,) = client.list_batches()
        assert batch.name.startswith("query-")
        jobs = client.list_jobs(batch=batch.name, limit=ROWS)[::-1]
        assert [job.row for job in jobs] == list(range(1, ROWS + 1))
        assert jobs[7].messages == [{"role": "user", "content": "Judge: review 7"}]
        assert jobs[7].metadata["id"] == 7
        price, ok = jobs[7].metadata["price"], jobs[7].metadata["ok"]
        assert (Decimal(str(price)), ok in (True, 1)) == (Decimal("1.5"), True)
        assert date.fromisoformat(jobs[7].metadata["day"]) == date(2026, 1, 2)
        work(client)

        # A transaction for each group: what an interruption leaves, the same command completes.
        written: list[int] = []

        def interrupted(rows: int) -> None:
            written.append(rows)
            raise KeyboardInterrupt

        target = f"{theirs.url}#labels"
        with pytest.raises(KeyboardInterrupt):
            batch.write_into(target, on_rows=interrupted)
        assert theirs.run("SELECT count(*) FROM labels") == [(1000,)] and written == [1000]
        for _ in range(2):
            done = run("results", batch.name, "--into", target)
            assert done.exit_code == 0, done.output
            assert done.output.endswith(f"#labels: {ROWS:,} rows\n")
        assert theirs.run("SELECT count(*), count(DISTINCT job_id), min(id), max(id) FROM labels") == [
            (ROWS, ROWS, 0, ROWS - 1)
        ]
        found = theirs.run("SELECT review, label, completion_tokens, job_id FROM labels WHERE id = 7")
        assert found == [("review 7", client.get(jobs[7].id).text, 4, jobs[7].id)]

    theirs.run("CREATE TABLE narrow (job_id TEXT)")
    theirs.run("CREATE TABLE loose AS SELECT * FROM labels WHERE id < 0")
    for name, said in (
        ("narrow", "narrow: lacks the column 'id' of these results; add it"),
        ("loose", "loose: may have a job twice; make 'job_id' its primary key, or unique"),
    ):
        refused = run("results", batch.name, "--into", f"{theirs.url}#{name}")
        assert (refused.exit_code, said in refused.output) == (1, True), refused.output
        night = [
            "run",
            *asked,
            "--into",
            f"{theirs.url}#{name}",
            "--name",
            name,
            "--model",
            str(demo_model()),
        ]
        refused = CliRunner().invoke(main, night)  # in the evening, not in the morning
        assert (refused.exit_code, said in refused.output) == (1, True), refused.output
    with Client(server_settings) as client:
        assert [one.name for one in client.list_batches()] == [batch.name]


def test_a_query_can_only_read_and_says_what_is_wrong_with_it(theirs: Theirs, run: Any) -> None:
    def refused(query: str, url: str = theirs.url, code: int = 1) -> str:
        done = run("submit", "--query", query, "--from", url, "--template", "{{ id }}")
        assert done.exit_code == code, done.output
        assert len(done.output.strip().splitlines()) == 1
        return str(done.output)

    for query in ("DELETE FROM reviews", "DELETE FROM reviews RETURNING id", "DROP TABLE reviews"):
        refused(query)
    assert theirs.run("SELECT count(*) FROM reviews") == [(ROWS + 1,)]
    assert "column 'id' is there twice; rename one with AS" in refused("SELECT id, id FROM reviews")
    assert "query: gives no rows" in refused("SELECT id FROM reviews WHERE id < 0", code=4)
    assert "nowhere" in refused("SELECT id FROM nowhere")
    assert "there is no such file" in refused("SELECT 1 AS id", "sqlite:////nowhere/x.db")
    assert "known are postgresql:// and sqlite:///" in refused("SELECT 1 AS id", "mysql://me:secret@host/db")
    assert "secret" not in refused("SELECT 1 AS id", "postgresql://me:secret@127.0.0.1:1/db")
    for arguments, said in (
        (("rows.csv", "--query", "SELECT 1"), "name a FILE, or a --query, one of them"),
        (("--query", "SELECT 1"), "--query and --from go together"),
        ((), "name a FILE, or a --query"),
    ):
        done = run("submit", *arguments)
        assert (done.exit_code, said in done.output) == (2, True)


def test_rows_come_through_a_cursor_of_the_server(theirs: Theirs) -> None:
    """So that the memory of the client does not grow with the rows."""
    if theirs.engine.dialect.name == "sqlite":
        return  # whose driver always reads row by row
    fetching = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE query LIKE 'FETCH FORWARD%' AND state = 'idle in transaction' AND datname = current_database()"
    )
    rows = rows_of(QUERY, UsersDatabase(theirs.url))
    assert next(rows)["id"] == 0
    assert theirs.run(fetching) == [(1,)]
    rows.close()
    assert theirs.run(fetching) == [(0,)]
