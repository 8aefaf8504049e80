"""The pipe between a worker and its engine."""

import threading
import time

import pytest

from jobs.contract import GenerationParams
from jobs.errors import ModelFileError, RunnerError
from tests.servers import wait_until
from tests.unit.engine.scripted import EOS, PieceStream, ScriptedRunner
from tests.unit.worker.threads import engine_in_thread
from worker import engine_link
from worker.engine.engine import Engine
from worker.engine.request import Completion, Request


def make_engine() -> Engine:
    runner = ScriptedRunner(script=[0, 1] * 40)
    return Engine(
        runner,
        text_stream=PieceStream,
        eos_ids=frozenset({EOS}),
        context_length=100,
        max_sequences=runner.slots,
        token_budget=64,
    )


def request(name: str, tokens: int) -> Request:
    # The scripted runner takes the seed for the length of the prompt.
    return Request(name, 1, (1, 2, 3), GenerationParams(max_tokens=tokens, ignore_eos=True), seed=3)


def test_completions_and_counters_come_back() -> None:
    link = engine_in_thread(make_engine)
    done: list[Completion] = []
    link.start(done.append, lambda error: pytest.fail(str(error)))
    assert link.stats.generated_tokens == 0
    for name in "abc":
        link.submit(request(name, 6))
    wait_until(lambda: len(done) == 3)
    assert {completion.job_id: completion.text for completion in done} == dict.fromkeys("abc", "ababab")
    wait_until(lambda: link.stats.generated_tokens == 18 and link.stats.free_pages == link.stats.pages)
    link.stop()
    assert not link.alive
    link.submit(request("late", 6))  # nobody listens, and nobody is hurt


def test_abandoned_work_completes_no_more() -> None:
    link = engine_in_thread(make_engine)
    done: list[Completion] = []
    link.start(done.append, lambda error: pytest.fail(str(error)))
    for number in range(50):
        link.submit(request(f"job-{number}", 90))
    link.abandon()
    count = len(done)
    link.submit(request("next", 4))
    wait_until(lambda: any(completion.job_id == "next" for completion in done))
    assert len(done) == count + 1
    link.stop()


def test_engine_that_cannot_be_built_says_why() -> None:
    def build() -> Engine:
        raise ModelFileError("model.gguf: the file ends early")

    link = engine_in_thread(build)
    with pytest.raises(RunnerError, match=r"^model\.gguf: the file ends early$"):
        link.start(lambda completion: None, lambda error: None)
    assert not link.alive


def test_engine_that_breaks_is_reported_once() -> None:
    engine = make_engine()

    def broken() -> list[Completion]:
        raise RunnerError("the arithmetic gave out")

    engine.step = broken  # type: ignore[method-assign]
    link = engine_in_thread(lambda: engine)
    failures: list[str] = []
    reported = threading.Event()

    def on_failure(error: RunnerError) -> None:
        failures.append(str(error))
        reported.set()

    link.start(lambda completion: None, on_failure)
    link.submit(request("a", 5))
    assert reported.wait(30)
    assert not link.alive
    link.abandon()
    link.stop()
    assert failures == ["the arithmetic gave out"]


def test_engine_that_hangs_with_a_full_pipe_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "_HANG_SECONDS", 0.3)
    engine, hanging, going_on = make_engine(), threading.Event(), threading.Event()

    def hang() -> list[Completion]:
        hanging.set()
        assert going_on.wait(60)
        raise RunnerError("killed")  # what becomes of a process; a thread has to end by itself

    engine.step = hang  # type: ignore[method-assign]
    link = engine_in_thread(lambda: engine)
    link.start(lambda completion: None, lambda error: None)
    link.submit(request("job", 5))
    assert hanging.wait(30)
    sent: list[int] = []

    def fill() -> None:
        for number in range(20_000):
            link.submit(request(f"job-{number}", 5))
            sent.append(number)

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    wait_until(lambda: sent and link._sending.locked())
    time.sleep(0.5)
    assert len(sent) < 20_000  # the pipe is full
    assert link.progress(["job"], 1) == [] == link.abandon()
    stopping = threading.Thread(target=link.stop, daemon=True)
    stopping.start()
    time.sleep(1.0)  # more than it waits to hand over Stop, and for the end
    going_on.set()
    stopping.join(30)
    assert not stopping.is_alive() and not link.alive
    filling.join(30)
    assert not filling.is_alive()
