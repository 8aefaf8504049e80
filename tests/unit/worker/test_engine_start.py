"""Engines that do not come to their start, or to the end of a step: they are killed, and it is said where."""

import os
import sys
import time
from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import RunnerError
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.link import link as engine_link
from nightmill.worker.link.launching import EngineAhead, launch_engine
from nightmill.worker.link.link import EngineLink
from nightmill.worker.runners.starting import StartStep

pytestmark = pytest.mark.heavy

DOCS = Path(__file__).parents[3] / "docs" / "running-for-months.md"
SETTINGS = Settings(model="/models/some.gguf", weights="file", gpu=1)
# Ends by no signal but SIGKILL, as a process that waits for a kernel of the GPU.
ENGINE = """
import signal, sys, time
from multiprocessing.connection import Connection
from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.worker.link.messages import Failed, Loading, Ready
from nightmill.worker.runners.starting import StartStep
READY = Ready(None, Arithmetic("cuda", "a GPU", "f16", "f16", "0", "0"))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
worker = Connection(int(sys.argv[-1]))
begin = worker.recv()
{steps}
while True:
    time.sleep(60)
"""


def engine_that(steps: str, *, weights: str = "file", hang_seconds: float = 60.0) -> EngineLink:
    """A process that does this when it was told what to serve, and then nothing."""
    command = [sys.executable, "-c", ENGINE.format(steps=steps)]
    settings = SETTINGS.model_copy(update={"weights": weights})
    return launch_engine(settings, command, hang_seconds=lambda: hang_seconds)


def failure_of(link: EngineLink) -> str:
    """Why it does not start; its process has ended by then."""
    processes = [link._host._process]  # type: ignore[attr-defined]
    with pytest.raises(RunnerError) as failed:
        link.start(lambda completion: None, lambda error: None)
    processes.append(link._host._process)  # type: ignore[attr-defined]
    assert all(process.poll() is not None for process in processes)
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


def test_a_launch_that_never_ends_in_service_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers nothing from then on, as an engine that waits for the GPU in `collect`."""
    monkeypatch.setattr(engine_link, "_PING_SECONDS", 0.1)
    monkeypatch.setattr(EngineLink, "stats", None)
    link = engine_that("worker.send(READY)", hang_seconds=0.6)
    failures: list[str] = []
    link.start(lambda completion: None, lambda error: failures.append(str(error)))
    give_up = time.monotonic() + 60
    while not failures and time.monotonic() < give_up:
        time.sleep(0.02)
    assert failures and "a step hangs" in failures[0]
    process = link._host._process  # type: ignore[attr-defined]
    process.wait(120)
    link.stop()
    assert process.returncode == -9


WRONG = "Failed('the product qkv of layer 0 is wrong: give --weights 16bit', by_products=True)"
HANGS = "Loading(StartStep.SELF_TEST, 'head, 1 rows')"
FAULTS = {
    "wrong": f"worker.send({WRONG})",
    "trap": f"worker.send({HANGS}); signal.raise_signal(11)",
    "hang": f"worker.send({HANGS})",
}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_whose_products_fail_starts_once_more_with_plain_ones(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    link = engine_that(f"if begin.plain_products:\n    worker.send(READY)\nelse:\n    {FAULTS[fault]}")
    first = link._host._process  # type: ignore[attr-defined]
    link.start(lambda completion: None, lambda error: None)
    assert first.poll() is not None
    assert link.alive and link.arithmetic.device == "a GPU"
    said = {"wrong": "is wrong", "trap": "ended before it was ready", "hang": "does the GPU hang?"}[fault]
    assert link.note.startswith("plain products, slower than usual: ") and said in link.note
    assert "once more, with plain products" in caplog.text
    link.kill()
    link.stop()


@pytest.mark.usefixtures("hasty")
def test_if_plain_products_fail_too_both_reasons_and_the_remedy_are_told() -> None:
    said = failure_of(
        engine_that(f"worker.send(Failed('plain ones, too', True) if begin.plain_products else {WRONG})")
    )
    assert said.startswith("plain ones, too; with the usual products, before: the product qkv")
    assert "--weights 16bit" in said


@pytest.mark.parametrize("weights", ["fp8", "16bit"])
def test_weights_that_have_no_plain_products_are_refused(weights: str) -> None:
    assert failure_of(engine_that(f"worker.send({WRONG})", weights=weights)).endswith("--weights 16bit")


def test_a_fault_of_the_file_starts_nothing_once_more() -> None:
    assert failure_of(engine_that("worker.send(Failed('the file ends early'))")) == "the file ends early"


def test_an_engine_that_was_started_ahead_is_told_what_to_serve_by_whoever_has_it_then() -> None:
    told = "worker.send(Failed(f'{begin.settings.weights} on {begin.settings.gpu}'))"
    command = [sys.executable, "-c", ENGINE.format(steps=told)]
    for begins in (False, True):
        ahead = EngineAhead.start(command)
        if begins:
            ahead.begin(SETTINGS.model_copy(update={"gpu": 2}))
        handed_on = ahead.hand_on()
        assert ahead.connection.closed and handed_on.endswith(":begun") is begins
        process = ahead.host._process
        taken = EngineAhead.inherit(handed_on)
        assert taken is not None and taken.begun is begins
        assert not os.get_inheritable(taken.connection.fileno()), "other children would hold it open"
        link = launch_engine(SETTINGS, command, hang_seconds=lambda: 60.0, ahead=taken)
        with pytest.raises(RunnerError, match=f"file on {2 if begins else 1}"):
            link.start(lambda completion: None, lambda error: None)
        assert not taken.host.is_alive() and process.wait(0) == 0  # whose end somebody else was told


@pytest.mark.parametrize("waits", [False, True])
def test_an_engine_that_was_started_ahead_ends_where_nothing_is_to_be_served(waits: bool) -> None:
    ahead = EngineAhead.start()
    if waits:
        ahead.begin(Settings(model=demo_model(), reference=True), waits=True)
        assert ahead.connection.poll(240)  # it opens the model
    taken = EngineAhead.inherit(ahead.hand_on())
    assert taken is not None
    taken.connection.close()
    assert taken.host._process.wait(240) == 0, "it went on, and failed"


def test_an_engine_whose_worker_ends_while_it_is_built_ends_in_a_sentence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ahead = EngineAhead.start()
    ahead.begin(Settings(model=demo_model(), reference=True))
    assert ahead.connection.poll(240)
    ahead.connection.close()
    assert ahead.host._process.wait(240) == 1
    said = capfd.readouterr().err
    assert "Traceback" not in said and "the worker has ended before its engine was built" in said


def test_an_engine_that_waits_goes_on_when_it_is_told_to() -> None:
    settings = Settings(model=demo_model(), reference=True, max_sequences=2, context=64)
    ahead = EngineAhead.start()
    ahead.begin(settings, waits=True)
    ahead.go()
    link = launch_engine(settings, hang_seconds=lambda: 60.0, ahead=ahead)
    link.start(lambda completion: None, lambda error: None)
    assert link.stats.sequences == 2 and link.arithmetic.runner == "numpy"
    link.stop()


def test_an_engine_that_is_not_there_any_more_is_replaced(tmp_path: Path) -> None:
    with (tmp_path / "no socket").open("w") as file:
        for handed_on in (f"1:{file.fileno()}", "1:999999", "none"):
            assert EngineAhead.inherit(handed_on) is None
    ended = EngineAhead.start([sys.executable, "-c", ""])
    ended.host.join(120)
    ended.begin(SETTINGS)
    link = launch_engine(SETTINGS, hang_seconds=lambda: 60.0, ahead=ended)
    with pytest.raises(RunnerError, match="ended before it was ready, after 'opening the model file'"):
        link.start(lambda completion: None, lambda error: None)


def test_the_page_says_how_long_each_step_may_take() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for step in StartStep:
        assert f"| {step.words} | {step.seconds:.0f} |" in page, step
