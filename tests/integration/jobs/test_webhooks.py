"""A batch that has ended is told of at least once, under one id, whoever dies on the way."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import func, select

from nightmill.jobs.base import signing
from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.http_tables import WebhookRow
from nightmill.jobs.sql.webhooks import WebhookStore
from nightmill.jobs.webhooks.delivering import PAUSES
from tests.support.receiver import Received, Receiver, receiving
from tests.support.servers import Clock, free_port, worker_env

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture
def told(server_settings: Settings, receiver: Receiver) -> Settings:
    """Settings that allow the receiver."""
    allowed = {"webhook_urls": f"{receiver.url}/night", "webhook_secret": SECRET, "webhook_private": True}
    return server_settings.model_copy(update=allowed)


@pytest.fixture
def client(told: Settings, clock: Clock) -> Iterator[Client]:
    with Client(told, clock=clock) as made:
        yield made


def finish(client: Client) -> None:
    """End every queued job."""
    claims = Claims(client.database, "a" * 32)
    for claim in claims.claim([job.id for job in client.list_jobs(state="queued")]):
        claims.finish([Outcome(claim.job_id, claim.attempt, StopReason.EOS, "text", 2, 3)])


def verified(received: Received) -> dict[str, object]:
    """What a message says, if it is signed."""
    headers = received.headers
    time = int(headers["webhook-timestamp"])
    signed = signing.headers(signing.parse_secrets(SECRET), headers["webhook-id"], time, received.body)
    assert signed["webhook-signature"] == headers["webhook-signature"]
    message: dict[str, object] = json.loads(received.body)
    return message


def test_a_batch_is_told_of_once_it_has_ended(client: Client, receiver: Receiver, clock: Clock) -> None:
    url = f"{receiver.url}/night/tonight"
    for name in ("tonight", "other"):
        client.submit_batch(["one", {"prompt": 2}], name=name, webhook=url)
    client.courier.look()
    assert receiver.received == []  # rows are left
    finish(client)
    client.courier.look("tonight")
    (received,) = receiver.received
    message = verified(received)
    assert (received.path, message["type"]) == ("/night/tonight", "batch.ended")
    data = message["data"]
    assert isinstance(data, dict)
    assert (data["name"], data["state"], data["rows"]) == ("tonight", "completed_with_errors", 2)
    assert (data["succeeded"], data["unsuccessful"]) == (1, 1)
    clock.advance(days=2)
    client.courier.look()
    client.courier.look()
    assert [verified(one)["data"]["name"] for one in receiver.received] == ["tonight", "other"]  # type: ignore[index]
    client.get_batch("tonight").delete()
    with client.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(WebhookRow)).scalar_one() == 1


def test_what_fails_is_tried_again_under_its_id_until_it_is_given_up(
    client: Client, receiver: Receiver, clock: Clock
) -> None:
    client.submit_batch(["one"], name="tonight", webhook=f"{receiver.url}/night")
    finish(client)
    receiver.statuses = [500, 302, 200, 410]
    for pause in PAUSES[:2]:
        client.courier.look()
        clock.advance(seconds=pause.total_seconds() - 1)
        client.courier.look()  # it is not time yet
        clock.advance(seconds=1)
    # Whoever took it was killed before, or after it was sent: nobody can know.
    webhooks = WebhookStore(client.database)
    (taken,) = webhooks.due(10)
    assert webhooks.take(taken, timedelta(seconds=60)) and not webhooks.take(taken, timedelta(seconds=60))
    client.courier.look()
    assert len(receiver.received) == 2
    clock.advance(seconds=60)
    client.courier.look()
    clock.advance(days=10)
    client.courier.look()
    assert len(receiver.received) == 3  # delivered
    assert len({one.headers["webhook-id"] for one in receiver.received}) == 1
    client.submit_batch(["one"], name="gone", webhook=f"{receiver.url}/night")
    client.submit_batch(["one"], name="refused", webhook=f"{receiver.url}/night")
    finish(client)
    client.courier.look("gone")  # 410
    receiver.statuses = [500] * 100
    for _ in range(len(PAUSES) + 5):
        client.courier.look()
        clock.advance(days=1)
    assert len(receiver.received) == 4 + len(PAUSES) + 1
    with client.database.read() as connection:
        rows = connection.execute(select(WebhookRow.batch, WebhookRow.delivered_at, WebhookRow.error)).all()
    ends = {row.batch: (row.delivered_at is not None, row.error) for row in rows}
    assert ends == {
        "tonight": (True, None),
        "gone": (False, "it was answered with status 410"),
        "refused": (False, "it was answered with status 500"),
    }


def test_a_receiver_that_is_away_costs_one_attempt_and_holds_up_nobody(
    told: Settings, clock: Clock, receiver: Receiver
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    settings = told.model_copy(update={"webhook_urls": f"{nobody},{receiver.url}"})
    with Client(settings, clock=clock) as client:
        for name, url in (("a", nobody), ("b", nobody), ("c", receiver.url)):
            client.submit_batch(["one"], name=name, webhook=f"{url}/night")
            clock.advance(seconds=1)
        finish(client)
        client.courier.look()
        assert [verified(one)["data"]["name"] for one in receiver.received] == ["c"]  # type: ignore[index]
        with client.database.read() as connection:
            rows = connection.execute(select(WebhookRow.batch, WebhookRow.attempts, WebhookRow.error)).all()
        attempts = {row.batch: (row.attempts, row.error) for row in rows}
        assert attempts == {"a": (1, "connection refused"), "b": (0, None), "c": (1, None)}


def test_only_allowed_urls_are_taken_and_a_client_without_the_secret_sends_nothing(
    told: Settings, clock: Clock, receiver: Receiver, tmp_path: Path
) -> None:
    without = told.model_copy(update={"webhook_secret": None})
    url = f"{receiver.url}/night"
    with Client(without, clock=clock) as client, Client(told, clock=clock) as other:
        for bad in (f"{receiver.url}/elsewhere", "https://evil.example/night", 5):
            with pytest.raises(InvalidParameterError, match=r"^webhook: ") as refused:
                client.submit_batch(["one"], name="never", webhook=bad)  # type: ignore[arg-type]
            assert refused.value.field == "webhook"
        assert client.list_batches() == []
        bad_rows = tmp_path / "bad.jsonl"
        bad_rows.write_text('{"prompt": 1}\n')
        command = ["batch", "submit", str(bad_rows), "--name", "tonight", "--webhook", url]
        assert CliRunner().invoke(main, command, env=worker_env(without)).exit_code == 4
        clock.time = client.database.now().replace(year=2100)
        client.courier.look()
        assert receiver.received == []
        other.courier.look()
        assert len(receiver.received) == 1
