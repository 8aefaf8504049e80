"""The report of a worker with each heartbeat, in the column `workers.stats`."""

import time
from dataclasses import asdict
from pathlib import Path

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.settings import Settings
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.service.shards import Service


class Load:
    """The engine's counters since its start, how full it is, its speed since the last time, and its GPU.

    And what it serves, for whoever tokenises as it does: its model file, its arithmetic, and its tool format.
    """

    def __init__(self, service: Service, probe: GpuProbe, settings: Settings) -> None:
        self._service = service
        self._probe = probe
        file = None if settings.model is None else str(Path(settings.model).absolute())
        self._hours = {} if settings.hours is None else {"hours": settings.hours}
        self._served = {"model_file": file, "tool_format": settings.tool_format}
        self._last = (time.monotonic(), service.engine.stats.generated_tokens)

    def read(self) -> JsonObject:
        """Return these figures as of now; `tokens_per_second` is the speed since the last call."""
        stats = self._service.engine.stats
        (then, tokens), now = self._last, time.monotonic()
        self._last = now, stats.generated_tokens
        speed = (stats.generated_tokens - tokens) / max(now - then, 1e-3)
        told = {"in_flight": len(self._service.in_flight.keys()), "tokens_per_second": round(speed, 1)}
        note = {"note": self._service.engine.note} if self._service.engine.note else {}
        served = self._served | {"arithmetic": str(self._service.engine.arithmetic)}
        return asdict(stats) | told | self._probe.last | note | served | self._hours
