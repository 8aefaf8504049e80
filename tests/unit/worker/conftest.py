"""Benches that are stopped when a test is over."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nightmill.jobs.client.client import Client
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.bench import Bench, Gated, stop


@pytest.fixture
def build(sqlite_client: Client) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(runner: ScriptedRunner, **options: Any) -> Bench:
        made.append(Bench(sqlite_client, runner, **options))
        return made[-1]

    yield make
    for bench in made:
        if isinstance(bench.runner, Gated):
            bench.runner.gate.set()
        stop(bench)
