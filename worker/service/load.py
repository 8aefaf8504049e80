"""What a worker says of itself with each heartbeat, in the column `workers.stats`."""

import time
from dataclasses import asdict

from nightmill.jobs.contract import JsonObject
from nightmill.worker.service.nvml import GpuProbe
from nightmill.worker.service.shards import Service


class Load:
    """The engine's counters since its start, how full it is, its speed since the last time, and its GPU."""

    def __init__(self, service: Service, probe: GpuProbe) -> None:
        self._service = service
        self._probe = probe
        self._last = (time.monotonic(), service.engine.stats.generated_tokens)

    def read(self) -> JsonObject:
        """As of now."""
        stats = self._service.engine.stats
        (then, tokens), now = self._last, time.monotonic()
        self._last = now, stats.generated_tokens
        speed = (stats.generated_tokens - tokens) / max(now - then, 1e-3)
        told = {"in_flight": len(self._service.in_flight.keys()), "tokens_per_second": round(speed, 1)}
        note = {"note": self._service.engine.note} if self._service.engine.note else {}
        return asdict(stats) | told | self._probe.last | note
