"""Ways to start a worker, and what is said where it cannot start: one line, never a traceback."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.worker.assembly.model import demo_model
from tests.support.ggufs import write_model
from tests.support.receiver import Receiver, receiving
from tests.support.servers import RedisServer, free_port, wait_until, worker_env

CELERY = [sys.executable, "-m", "celery", "-A", "nightmill.worker.app", "worker"]
NIGHTMILL = [sys.executable, "-m", "nightmill", "worker"]
ROOT = Path(__file__).resolve().parents[3]


def refused(command: list[str], settings: Settings, **more: object) -> str:
    """Run a command that must fail; returns what it said."""
    done = subprocess.run(
        command,
        env=worker_env(settings, **more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Traceback" not in said, said
    return said


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.mark.parametrize(
    "command",
    [
        [*NIGHTMILL, "--model", str(demo_model()), "--reference", "--log-format", "json"],
        [*CELERY, "--pool=threads", "--model", str(demo_model()), "--reference", "--loglevel=INFO"],
    ],
    ids=["nightmill", "celery"],
)
def test_both_commands_start_the_same_worker(
    command: list[str], sqlite_settings: Settings, receiver: Receiver, tmp_path: Path
) -> None:
    log, port = tmp_path / "worker.log", free_port()
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    watched = {"webhook_urls": receiver.url, "webhook_secret": secret, "webhook_private": True}
    settings = sqlite_settings.model_copy(update=watched | {"metrics_port": port})
    rows = [{"prompt": "Count from 1 to 3", "max_tokens": 4, "temperature": 0}]
    with Client(settings) as client, log.open("w") as output:
        client.submit_batch(rows, webhook=f"{receiver.url}/night")
        (job_id,) = (job.id for job in client.list_jobs())
        environment = worker_env(settings)
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        ) as process:
            try:
                client.wait(job_id, timeout=120)
                job = client.get(job_id)
                assert job.state is JobState.SUCCEEDED
                (worker,) = client.workers()
                assert (worker.id, worker.pid, worker.state) == (job.worker, process.pid, "ready")
                assert worker.model == "nightmill-demo"
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    told = answer.read().decode()
                wanted = 'nightmill_worker_jobs_total{model="nightmill-demo",stop_reason="length"} 1.0'
                assert wanted in told.splitlines()
                wait_until(lambda: receiver.received)
            finally:
                process.send_signal(signal.SIGTERM)
            assert process.wait(240) == 0
        assert client.workers()[0].state == "stopped"
    lines = log.read_text().splitlines()
    if "json" in command:
        messages = [json.loads(line)["message"] for line in lines]
        assert any(said.startswith("ready: ") for said in messages)
        assert any(said.startswith("stopped; 4 tokens drawn") for said in messages)
    else:
        assert any("] ready: " in line for line in lines)


def test_pool_without_threads_is_refused(sqlite_settings: Settings) -> None:
    said = refused([*CELERY, "--pool=solo", "--model", str(demo_model())], sqlite_settings)
    assert "start Celery with --pool=threads" in said


def test_that_no_model_is_named_is_said(sqlite_settings: Settings) -> None:
    assert "no model file is named: give --model FILE" in refused(NIGHTMILL, sqlite_settings)


@pytest.mark.slow  # tests/unit/model/test_gguf_file.py has files that cannot be read
def test_missing_or_broken_model_is_named(sqlite_settings: Settings, tmp_path: Path) -> None:
    said = refused([*NIGHTMILL, "--model", str(tmp_path / "absent.gguf")], sqlite_settings)
    assert "absent.gguf" in said and "ModelFileError" not in said
    whole = write_model(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) // 2])
    said = refused([*NIGHTMILL, "--model", str(cut)], sqlite_settings)
    assert "cut.gguf: tensor " in said and "past the end of the file" in said


@pytest.mark.slow  # tests/unit/worker/test_check_model.py asks for such a context, too
def test_context_beyond_the_model_is_refused(sqlite_settings: Settings) -> None:
    command = [*NIGHTMILL, "--model", str(demo_model()), "--reference", "--context", "100000"]
    assert "--context 100000 is more than the 512 tokens" in refused(command, sqlite_settings)


@pytest.mark.slow  # tests/integration/jobs/test_outages.py names servers without their passwords
def test_unreachable_servers_are_named_without_their_passwords(sqlite_settings: Settings) -> None:
    command = [*NIGHTMILL, "--model", str(demo_model())]
    port = free_port()
    said = refused(command, sqlite_settings, broker_url=f"redis://:hush@127.0.0.1:{port}/0")
    assert f"the broker at redis://:***@127.0.0.1:{port}/0 does not answer" in said and "hush" not in said
    url = f"postgresql://someone:hush@127.0.0.1:{port}/nightmill"
    said = refused(command, sqlite_settings, database_url=url)
    assert f"someone:***@127.0.0.1:{port}/nightmill does not answer" in said and "hush" not in said


def test_unknown_setting_is_refused_with_a_suggestion(sqlite_settings: Settings) -> None:
    wrong = "NIGHTMILL_MODLE is not a setting of Nightmill. Did you mean NIGHTMILL_MODEL?"
    environment = worker_env(sqlite_settings) | {"NIGHTMILL_MODLE": "x"}
    done = subprocess.run(
        [*CELERY, "--pool=threads"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in said and wrong in said
    ours = CliRunner().invoke(main, ["worker"], env=environment)
    assert (ours.exit_code, ours.stdout) == (1, "") and wrong in ours.stderr


def test_check_says_what_is_wrong_and_what_to_do(sqlite_settings: Settings) -> None:
    away = worker_env(sqlite_settings, broker_url=f"redis://127.0.0.1:{free_port()}/0", model="/nowhere.gguf")
    refused = CliRunner().invoke(main, ["check"], env=away)
    said = refused.output
    assert refused.exit_code == 1
    assert "FAIL broker" in said and "Check that Redis runs" in said
    assert "FAIL model" in said and "/nowhere.gguf" in said
    assert "ok   database" in said
    right = ["check", "--model", str(demo_model()), "--json"]
    fine = CliRunner().invoke(main, right, env=worker_env(sqlite_settings))
    assert fine.exit_code == 0 and '"part": "model", "ok": true' in fine.stdout


def test_check_refuses_a_redis_that_evicts_messages(
    sqlite_settings: Settings, redis_server: RedisServer
) -> None:
    environment = worker_env(sqlite_settings, broker_url=redis_server.url)
    with redis_server.client() as connection:
        connection.config_set("maxmemory-policy", "allkeys-lru")
        refused = CliRunner().invoke(main, ["check"], env=environment)
        assert refused.exit_code == 1
        assert "FAIL broker" in refused.output
        assert (
            "maxmemory-policy allkeys-lru loses messages when memory is full; set noeviction"
            in refused.output
        )
        connection.config_set("maxmemory-policy", "volatile-lru")  # messages never expire
    fine = CliRunner().invoke(main, ["check"], env=environment)
    assert (fine.exit_code, "ok   broker" in fine.output) == (0, True)
