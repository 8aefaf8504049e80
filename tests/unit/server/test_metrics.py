"""What Prometheus is told, by whom it may be read, and that the board shows nothing else."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import DatabaseUnreachableError
from nightmill.jobs.server.metrics import ANY, MOST_MODELS, OTHERS, names_of
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.service.metrics import WorkerMetrics
from tests.support.nvml import FakeNvml
from tests.support.servers import wait_until
from tests.unit.server.conftest import EVE, OPS

BOARD = Path(__file__).parents[3] / "docs" / "grafana.json"

Sample = tuple[str, tuple[str, ...]]


def samples(text: str) -> dict[Sample, float]:
    """Values by name and labels, in the order of the labels' names."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_numbers_of_servers_and_workers_are_true_and_those_of_the_board_are_there(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(worker=False) as server, server.http() as alice, server.http(OPS) as ops:
        bench, client = server.bench, server.client
        done = client.enqueue_many(["prompt"] * 3, max_tokens=5, temperature=0)
        bench.service.run_shard(list(done))
        wait_until(lambda: all(client.get(job_id).state.final for job_id in done))
        client.enqueue("later", scheduled_at=client.database.now().replace(year=2100))
        client.enqueue("waits", model="model")
        assert alice.get("/nothing/of/this/name").status_code == 404
        assert alice.get("/v1/jobs/" + "0" * 32).status_code == 404
        refused = alice.get("/metrics")
        assert refused.status_code == 403 and "NAME:read=KEY" in refused.json()["error"]["message"]
        with server.http(None) as nobody, server.http(EVE) as eve:
            assert nobody.get("/metrics").status_code == 401
            time.sleep(0.05)
            told = samples(eve.get("/metrics").text)
        assert told["nightmill_jobs", (ANY, "succeeded")] == 3
        assert told["nightmill_completion_tokens", (ANY, "succeeded")] == client.store.tokens()[1] > 0
        assert told["nightmill_prompt_tokens", (ANY, "succeeded")] == client.store.tokens()[0] > 0
        assert told["nightmill_cached_tokens", (ANY, "succeeded")] >= 0
        assert told["nightmill_reasoning_tokens", (ANY, "succeeded")] == 0
        assert told["nightmill_jobs", (ANY, "queued")] == told["nightmill_jobs", ("model", "queued")] == 1
        assert told["nightmill_queue_age_seconds", (ANY,)] == 0  # its time has not come
        assert 0.05 <= told["nightmill_queue_age_seconds", ("model",)] < 60
        assert told["nightmill_workers", ("model", "starting")] == 1
        asked = {labels: times for (name, labels), times in told.items() if name.endswith("requests_total")}
        assert asked["GET", OTHERS, "404"] == asked["GET", "/v1/jobs/{job_id}", "404"] == 1
        assert (asked["GET", "/metrics", "403"], asked["GET", "/metrics", "401"]) == (1, 1)
        assert told["nightmill_http_requests_open", ()] == 1  # this one
        client.enqueue("waits, too", model="model")
        wait_until(lambda: samples(ops.get("/metrics").text)["nightmill_jobs", ("model", "queued")] == 2)
        assert told["nightmill_database_up", ()] == 1
        time.sleep(1)  # for so long an answer is good
        with monkeypatch.context() as patched:
            patched.setattr(client.database, "read", _away)
            without = samples(ops.get("/metrics").text)
        assert without["nightmill_database_up", ()] == 0 < without["nightmill_http_requests_open", ()]
        assert not [name for name, _ in without if name in ("nightmill_jobs", "nightmill_workers")]

        registry, probe = CollectorRegistry(), GpuProbe(0, lambda name: FakeNvml())
        probe.refresh()
        registry.register(WorkerMetrics(bench.service, "model", "GPU 0", probe))
        worked = samples(generate_latest(registry).decode())
        stats = bench.service.engine.stats
        generated = sum(job.completion_tokens or 0 for job in map(client.get, done))
        assert worked["nightmill_worker_generated_tokens_total", ("model",)] == generated
        assert worked["nightmill_worker_steps_total", ("model",)] == stats.steps
        assert generated <= worked["nightmill_worker_step_sequences_total", ("model",)] <= 3 * stats.steps
        assert worked["nightmill_worker_kv_pages", ("model", "free")] == stats.free_pages
        ended = [worked["nightmill_worker_jobs_total", ("model", str(reason))] for reason in StopReason]
        assert sum(ended) == 3
        seconds = sum(job.gpu_seconds or 0.0 for job in map(client.get, done))
        assert worked["nightmill_worker_gpu_seconds_total", ("model",)] == pytest.approx(seconds)
        joules = sum(job.energy_joules or 0.0 for job in map(client.get, done))
        assert worked["nightmill_worker_energy_joules_total", ("model",)] == pytest.approx(joules)
        assert worked["nightmill_worker_model_loaded", ("model",)] == 1
        assert worked["nightmill_worker_gpu_power_watts", ("model",)] == 312.5
        for name in ("claim", "write"):
            assert worked[f"nightmill_worker_{name}_seconds_bucket", ("+Inf", "model")] >= 1
            assert 0 < worked[f"nightmill_worker_{name}_seconds_sum", ("model",)] < 60

        there = {
            name for name, _ in (*told, *worked) if "nightmill" in name and not name.endswith("_created")
        }
        shown = {name for query in _queries() for name in re.findall(r"nightmill_\w+", query)}
        assert shown <= there and len(shown) > 15
        documented = set(re.findall(r"`(nightmill_\w+)`", BOARD.with_name("operations.md").read_text()))
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in there} == documented


def _away() -> None:
    raise DatabaseUnreachableError("the database does not answer")


def _queries() -> list[str]:
    """What the board asks Prometheus."""
    board = json.loads(BOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    chosen = [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    return asked + chosen


def test_labels_are_bounded_however_many_models_there_were() -> None:
    names = names_of({None, *(f"model-{number:03}" for number in range(2 * MOST_MODELS))})
    assert len(names) == 2 * MOST_MODELS + 1
    assert set(names.values()) == {ANY, OTHERS, *(f"model-{number:03}" for number in range(MOST_MODELS))}
