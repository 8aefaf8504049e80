"""A worker, a server and a stream with a user of Redis who may do what docs/operations.md says."""

import json
import re
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BrokerError
from nightmill.worker.commands.process import running_worker
from nightmill.worker.service.reaching import reach_broker
from tests.integration.worker.conftest import on_sqlite
from tests.support.servers import RedisServer, http_process, wait_until, worker_env

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
ROWS = 100
PATIENCE = 120.0


def documented_rules() -> list[str]:
    """The rules of the page, with a password."""
    found = re.search(r"^ACL SETUSER nightmill (.*)$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1].replace("SECRET", "secret").split()


def limited(settings: Settings, server: RedisServer, *rules: str) -> Settings:
    """These settings, with a user of the server who has these rights."""
    with server.client() as redis_client:
        redis_client.execute_command("ACL", "SETUSER", "nightmill", "reset", *rules)
        redis_client.execute_command("ACL", "LOG", "RESET")
    return settings.model_copy(update={"broker_url": server.url.replace("//", "//nightmill:secret@")})


@pytest.mark.slow
@on_sqlite
def test_the_documented_rights_are_enough(quick: Settings, redis_server: RedisServer, tmp_path: Path) -> None:
    settings = limited(quick, redis_server, *documented_rules())
    checked = CliRunner().invoke(main, ["check"], env=worker_env(settings))
    assert re.search(r"ok +broker", checked.output), checked.output
    with Client(settings) as client, running_worker(client, tmp_path / "worker.log", []):
        ids = client.enqueue_many(["a"] * ROWS, max_tokens=2)
        client.wait(ids, timeout=PATIENCE)
        with (
            http_process(settings, tmp_path / "serve.log") as (url, _),
            httpx2.Client(base_url=url, timeout=PATIENCE) as http,
        ):
            wait_until(lambda: http.get("/ready").status_code == 200)
            body = {
                "prompt": "Once",
                "max_tokens": 40,
                "ignore_eos": True,
                "model": client.worker_store.serving()[0].model,
            }
            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                pieces = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
            assert len(pieces) > 3  # it came as it grew, through Redis
        assert client.broker.queue_length(None) == 0
    with redis_server.client() as redis_client:
        denied = {entry[b"object"] for entry in redis_client.execute_command("ACL", "LOG")}
    # Clients say their names where they may: before Redis 7 that takes rights over other clients.
    assert denied <= {b"client"}


@on_sqlite
@pytest.mark.parametrize("missing", ["~nightmill*", "~_kombu.binding*", "~unacked*", "+@write"])
def test_check_finds_a_right_that_lacks(quick: Settings, redis_server: RedisServer, missing: str) -> None:
    rules = [rule for rule in documented_rules() if rule != missing]
    assert len(rules) < len(documented_rules())
    settings = limited(quick, redis_server, *rules)
    with Client(settings) as client, pytest.raises(BrokerError, match=r"refused a command: .*permission"):
        reach_broker(client.broker, woken=False)  # as a worker does, which would otherwise wait for ever
    checked = CliRunner().invoke(main, ["check"], env=worker_env(settings))
    assert checked.exit_code == 1
    assert re.search(r"FAIL broker .*refused a command", checked.output), checked.output
    assert "does not answer" not in checked.output


@on_sqlite
def test_a_redis_that_takes_nothing_is_found_and_nobody_waits_for_it(
    quick: Settings, redis_server: RedisServer, tmp_path: Path
) -> None:
    settings = quick.model_copy(update={"broker_url": redis_server.url})
    body = {"prompt": "Once", "max_tokens": 4}
    with Client(settings) as client, running_worker(client, tmp_path / "worker.log", []):
        body["model"] = client.worker_store.serving()[0].model
        with (
            http_process(settings, tmp_path / "serve.log") as (url, _),
            httpx2.Client(base_url=url, timeout=PATIENCE) as http,
            redis_server.client() as redis_client,
        ):
            assert http.get("/ready").json()["broker"] is True
            redis_client.execute_command("REPLICAOF", "127.0.0.1", "1")
            refused = http.post("/v1/completions", json=body, timeout=10.0)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "the broker accepts no jobs now; try again later"
            assert http.post("/v1/jobs", json={"prompt": "later"}, timeout=10.0).status_code == 202
            wait_until(lambda: http.get("/ready").json()["broker"] is False)
            checked = CliRunner().invoke(main, ["check"], env=worker_env(settings))
            assert re.search(r"FAIL broker .*refused a command: .*read only replica", checked.output)
            redis_client.execute_command("REPLICAOF", "NO", "ONE")
            wait_until(lambda: http.get("/ready").json()["broker"] is True)
            answered = wait_until(lambda: _answered(http, body), PATIENCE)
            assert answered.json()["choices"][0]["text"]


def _answered(http: httpx2.Client, body: dict[str, object]) -> httpx2.Response | None:
    answer = http.post("/v1/completions", json=body)
    return answer if answer.status_code == 200 else None
