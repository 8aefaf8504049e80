"""Batches over HTTP that end before their rows do: by a time, by a budget."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
from sqlalchemy import update

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import wait_until
from tests.unit.server.conftest import BOB, Server
from tests.unit.server.openai_batches import OPEN, ended, lines, row, submit

pytestmark = pytest.mark.usefixtures("looks_often")


def test_a_batch_ends_in_time_though_no_worker_lives(start: Callable[..., Any]) -> None:
    with start(worker=False) as server:
        client = server.openai()
        batch = ended(client, submit(client, row("a"), row("b"), window="1s"))
        assert batch.status == "expired" and batch.expired_at >= batch.expires_at - 1
        assert [one["error"]["code"] for one in lines(client, batch.error_file_id)] == ["deadline"] * 2
        assert batch.output_file_id is None


def test_a_batch_over_http_ends_at_its_budget_and_goes_on_with_a_larger_one(
    start: Callable[..., Any],
) -> None:
    # Only what is said here is run: a worker that sees a row late would take it once it is due.
    with start(worker=False) as server, server.http() as http, server.http(BOB) as bob:
        rows = b"".join(b'{"prompt": "Once", "max_tokens": 9, "seed": %d}\n' % seed for seed in range(60))
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("night.jsonl", rows)}).json()
        night = http.post(
            "/v1/night", json={"file": file["id"], "budget": "1-tokens", "scheduled_at": "1h"}
        ).json()
        url = f"/v1/night/{night['id']}"
        wait_until(lambda: http.get(url).json()["status"] == "in_progress", what="its rows")
        batch = server.client.get_batch(night["id"])
        ids = list(batch.store.ids(batch.name, JobState.QUEUED))
        with server.client.database.write() as connection:
            connection.execute(update(JobRow).values(scheduled_at=None))
        server.bench.run(ids[:4])
        wait_until(lambda: http.get(url).json()["stopped_because"], what="the budget")
        assert Sweep(server.client.database).end_stopped() == 56
        night = wait_until(lambda: (now := http.get(url).json())["ended_at"] and now, what="the end")
        assert (night["status"], night["state"], night["succeeded"]) == ("expired", "expired", 4)
        refused = http.post(f"{url}/retry")
        assert refused.status_code == 400 and "raise it first" in refused.text
        assert bob.post(f"{url}/limits", json={"budget": "none"}).status_code == 404
        for bad in ({"budget": "much"}, {"deadline": "8h"}, {}):
            assert http.post(f"{url}/limits", json=bad).status_code == 400
        again = http.post(f"{url}/limits", json={"budget": "none"}).json()
        assert (again["status"], again["ended_at"], again["budget"]) == ("in_progress", None, None)
        server.bench.run(list(batch.store.ids(batch.name, JobState.QUEUED)))
        night = wait_until(lambda: (now := http.get(url).json())["ended_at"] and now, what="the end")
        assert (night["status"], night["succeeded"]) == ("completed", 60)


def test_headers_give_a_batch_of_openais_client_its_limits(server: Server) -> None:
    client = server.openai()
    rows = [row(f"r{seed}", seed=seed) for seed in range(150)]
    budget = {"X-Nightmill-Budget": "1-tokens", "X-Nightmill-Max-Failures": "5%"}
    batch = submit(client, *rows, extra_headers=budget, metadata={"night": "one"})
    sweep = Sweep(server.client.database)

    def over() -> Any:
        sweep.end_stopped()
        now = client.batches.retrieve(batch.id)
        return now.status not in OPEN and now

    done = wait_until(over, what="the budget")
    assert done.status == "expired" and 0 < done.request_counts.completed < 150
    (why,) = done.errors.data
    assert why.code == "budget" and why.message.startswith("its budget of 1 tokens is used up (")
    assert why.message.endswith(f"; POST /v1/night/{batch.id}/limits raises it")
    left = lines(client, done.error_file_id)
    assert {one["error"]["code"] for one in left} == {"budget"}
    assert len(left) == 150 - done.request_counts.completed
    with server.http() as http:
        night = http.get(f"/v1/night/{batch.id}").json()
        assert (night["budget"], night["max_failures"]) == ({"tokens": 1}, 0.05)
        raised = http.post(f"/v1/night/{batch.id}/limits", json={"budget": "1M-tokens"})
        assert raised.status_code == 200, raised.text
    queued = server.client.get_batch(batch.id).store.ids(batch.id, JobState.QUEUED)
    server.bench.run(list(queued))
    done = ended(client, batch)
    assert (done.status, done.request_counts.completed, done.errors) == ("completed", 150, None)
    for headers, message in (
        ({"X-Nightmill-Budget": "much"}, "X-Nightmill-Budget: 'much' is not a budget; write 20M-tokens"),
        ({"X-Nightmill-Max-Failures": "5"}, "X-Nightmill-Max-Failures: '5' is not a share of rows; write"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            submit(client, rows[0], extra_headers=headers)
        assert message in str(refused.value) and refused.value.param == next(iter(headers))
