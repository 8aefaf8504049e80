"""Engines that do not come to their start, or to the end of a step: they are killed, and it is said where."""

import sys
import time
from pathlib import Path

import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.jobs.settings import Settings
from nightmill.worker.link import link as engine_link
from nightmill.worker.link.link import EngineLink, launch_engine
from nightmill.worker.runners.starting import StartStep

DOCS = Path(__file__).parents[3] / "docs" / "running-for-months.md"
SETTINGS = Settings(model="/models/some.gguf", weights="file", gpu=1)
# Ends by no signal but SIGKILL, as a process that waits for a kernel of the GPU.
ENGINE = """
import signal, sys, time
from multiprocessing.connection import Connection
from nightmill.worker.link.messages import Failed, Loading
from nightmill.worker.runners.starting import StartStep
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
worker = Connection(int(sys.argv[-1]))
begin = worker.recv()
{steps}
while True:
    time.sleep(60)
"""


def engine_that(steps: str, *, hang_seconds: float = 60.0) -> EngineLink:
    """A process that does this when it was told what to serve, and then nothing."""
    command = [sys.executable, "-c", ENGINE.format(steps=steps)]
    return launch_engine(SETTINGS, command, hang_seconds=hang_seconds)


def failure_of(link: EngineLink) -> str:
    """Why it does not start; its process has ended by then."""
    process = link._host._process  # type: ignore[attr-defined]
    with pytest.raises(RunnerError) as failed:
        link.start(lambda completion: None, lambda error: None)
    assert process.poll() is not None
    return str(failed.value)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the start may go on for half a second without news, but for the first."""
    first = StartStep.OPENING
    monkeypatch.setattr(StartStep, "seconds", property(lambda step: 60.0 if step is first else 0.5))


@pytest.mark.usefixtures("hasty")
def test_a_start_that_hangs_is_killed_and_model_weights_gpu_and_step_are_named() -> None:
    said = failure_of(engine_that('worker.send(Loading(StartStep.TUNING, "64 rows"))'))
    assert "has not gone on loading for 0 s, after 'timing ways to multiply: 64 rows'" in said
    assert "is the disk too slow, or does the GPU hang?" in said
    assert "model /models/some.gguf, weights file, GPU 1" in said
    assert "--weights 16bit" in said


@pytest.mark.usefixtures("hasty")
def test_news_of_a_step_let_it_go_on() -> None:
    said = failure_of(
        engine_that(
            "for number in range(10):\n"
            "    worker.send(Loading(StartStep.COMPILING, f'file {number}'))\n"
            "    time.sleep(0.2)\n"
            "worker.send(Failed('enough'))".replace("{", "{{")
            .replace("}", "}}")
            .format()
        )
    )
    assert said == "enough"


def test_a_process_that_dies_while_it_starts_is_told_with_its_step() -> None:
    said = failure_of(
        engine_that("worker.send(Loading(StartStep.CAPTURING, '8 sequences')); signal.raise_signal(9)")
    )
    assert "ended before it was ready, after 'capturing steps as graphs: 8 sequences'" in said
    assert "model /models/some.gguf, weights file, GPU 1" in said


STARTED = """
from nightmill.jobs.arithmetic import Arithmetic
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.link.messages import Ready
worker.send(Ready(None, Arithmetic("cuda", "a GPU", "f16", "f16", "0", "0")))
"""


def test_a_launch_that_never_ends_in_service_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers nothing from then on, as an engine that waits for the GPU in `collect`."""
    monkeypatch.setattr(engine_link, "_PING_SECONDS", 0.1)
    monkeypatch.setattr(EngineLink, "stats", None)
    link = engine_that(STARTED, hang_seconds=0.6)
    failures: list[str] = []
    link.start(lambda completion: None, lambda error: failures.append(str(error)))
    give_up = time.monotonic() + 60
    while not failures and time.monotonic() < give_up:
        time.sleep(0.02)
    assert failures and "a step hangs" in failures[0]
    process = link._host._process  # type: ignore[attr-defined]
    process.wait(30)
    link.stop()
    assert process.returncode == -9


def test_the_page_says_how_long_each_step_may_take() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for step in StartStep:
        assert f"| {step.words} | {step.seconds:.0f} |" in page, step
