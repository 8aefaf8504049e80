"""A worker's numbers for Prometheus: kept by others anyway, and read when Prometheus asks for them."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from nightmill.jobs.base.extras import pip_install
from nightmill.jobs.errors import MissingExtraError, SettingsError
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.service.tally import BUCKETS, Durations

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import HistogramMetricFamily, Metric

    from nightmill.worker.service.shards import Service

_COUNTERS = {
    "steps": "Steps that the engine launched.",
    "step_sequences": "Sequences computed, summed over steps: divided by steps, the mean batch.",
    "prompt_tokens": "Tokens of prompts that were computed.",
    "shared_tokens": "Tokens of prompts that were found computed.",
    "generated_tokens": "Tokens that were drawn and kept.",
    "resumed_tokens": "Tokens that an earlier attempt had drawn, and that this one went on from.",
    "gpu_seconds": "Time of steps, which is charged to the jobs that they computed.",
    "energy_joules": "Energy of steps, which is charged to these jobs; nothing where the GPU does not tell.",
    "preemptions": "Times that a sequence gave its pages back, to be computed again.",
    "guessed_tokens": "Tokens that were guessed and computed, by drafts.",
    "guessed_right": "Guessed tokens that were drawn, each of which spared a step.",
}
"""Fields of EngineStats that only grow, and what they say."""


_OF_GPU = {
    "temperature_celsius": ("The GPU's temperature.", "temperature"),
    "power_watts": ("What the GPU draws.", "power"),
    "utilization_ratio": ("Share of the time in which the GPU computes something.", "utilization"),
    "memory_used_bytes": ("The GPU's memory that is taken, by whomever.", "memory_used"),
    "memory_bytes": ("The GPU's memory.", "memory"),
}
"""Metrics of the GPU, by name: the help text, and the field that GpuProbe finds."""


class WorkerMetrics:
    """Collects for a registry of prometheus_client."""

    def __init__(
        self, service: "Service", model: str, gpu: str | None, probe: GpuProbe, models: Sequence[str] = ()
    ) -> None:
        self._models = models or (model,)
        self._service = service
        self._model = model
        self._gpu = gpu or "none"
        self._probe = probe

    def collect(self) -> "Iterator[Metric]":
        """Every metric, as of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        stats = self._service.engine.stats
        info = InfoMetricFamily("nightmill_worker", "What this worker serves, and on what.")
        info.add_metric([], {"model": self._model, "gpu": self._gpu})
        yield info
        loaded = GaugeMetricFamily(
            "nightmill_worker_model_loaded",
            "1 for the model that is loaded, 0 for those that this worker loads in turn with it.",
            labels=["model"],
        )
        for model in self._models:
            loaded.add_metric([model], float(model == self._model))
        yield loaded
        for name, says in _COUNTERS.items():
            counter = CounterMetricFamily(f"nightmill_worker_{name}", says, labels=["model"])
            if (value := getattr(stats, name)) is not None:
                counter.add_metric([self._model], value)
            yield counter
        gauges = {
            "sequences": ("Sequences in the engine.", {"running": stats.running, "waiting": stats.waiting}),
            "kv_pages": (
                "Pages of the KV cache.",
                {"free": stats.free_pages, "used": stats.pages - stats.free_pages},
            ),
        }
        for name, (says, values) in gauges.items():
            gauge = GaugeMetricFamily(f"nightmill_worker_{name}", says, labels=["model", "state"])
            for state, value in values.items():
                gauge.add_metric([self._model, state], value)
            yield gauge
        held = GaugeMetricFamily(
            "nightmill_worker_jobs_in_flight", "Jobs that this worker has claimed.", labels=["model"]
        )
        held.add_metric([self._model], len(self._service.in_flight.keys()))
        yield held
        yield from self._tallied()
        told = self._probe.last
        for name, (says, field) in _OF_GPU.items():
            family = GaugeMetricFamily(f"nightmill_worker_gpu_{name}", says, labels=["model"])
            if field in told:
                family.add_metric([self._model], told[field])
            yield family

    def _tallied(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily

        tally = self._service.tally
        ended = CounterMetricFamily(
            "nightmill_worker_jobs", "Jobs whose results were written.", labels=["model", "stop_reason"]
        )
        for reason, jobs in tally.jobs().items():
            ended.add_metric([self._model, str(reason)], jobs)
        yield ended
        yield self._histogram("claim_seconds", "Time to claim a shard of jobs.", tally.claims)
        yield self._histogram("write_seconds", "Time to write a group of results.", tally.writes)

    def _histogram(self, name: str, says: str, durations: Durations) -> "HistogramMetricFamily":
        from prometheus_client.core import HistogramMetricFamily

        times, seconds = durations.read()
        ends = [*(f"{end:g}" for end in BUCKETS), "+Inf"]
        family = HistogramMetricFamily(f"nightmill_worker_{name}", says, labels=["model"])
        family.add_metric([self._model], list(zip(ends, accumulate(times), strict=True)), seconds)
        return family


def serve_metrics(host: str, port: int) -> "CollectorRegistry":
    """Answer at http://HOST:PORT/metrics from now on, with what is registered with the returned registry.

    Raises MissingExtraError without prometheus_client, SettingsError if the address cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"--metrics-port needs the package prometheus-client: {pip_install('metrics')}"
        ) from None
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host}, port {port}, for metrics: {error.strerror or error}; give another "
            "with --metrics-host or --metrics-port"
        ) from None
    return registry
