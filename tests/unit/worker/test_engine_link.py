"""The pipe between a worker and its engine."""

import pickle
import threading
from dataclasses import fields
from multiprocessing import Pipe

import pytest

from nightmill.jobs.errors import ModelFileError, RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Delta, Request
from nightmill.worker.link import link as engine_link
from nightmill.worker.link.link import EngineLink
from nightmill.worker.link.messages import Loading
from nightmill.worker.runners.starting import StartStep
from tests.support.servers import wait_until
from tests.unit.engine.by_definition import EOS, PieceStream
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.threads import engine_in_thread


def make_engine() -> Engine:
    runner = ScriptedRunner(script=[0, 1] * 40)
    return Engine(
        runner,
        Detokenizer(text_stream=PieceStream, eos_ids=frozenset({EOS})),
        EngineSizes(context_length=100, max_sequences=runner.slots, token_budget=64),
    )


def request(name: str, tokens: int) -> Request:
    # The scripted runner takes the seed for the length of the prompt.
    return Request(name, 1, (1, 2, 3), GenerationParams(max_tokens=tokens, ignore_eos=True), seed=3)


@pytest.mark.parametrize("kind", [Request, Completion])
def test_what_goes_through_the_pipe_keeps_all_its_values(kind: type[Request] | type[Completion]) -> None:
    names = [one.name for one in fields(kind)]
    sent = kind(**{name: f"value of {name}" for name in names})  # type: ignore[arg-type]
    got = pickle.loads(pickle.dumps(sent))
    assert type(got) is kind
    assert [getattr(got, name) for name in names] == [f"value of {name}" for name in names]


def test_completions_and_counters_come_back() -> None:
    link = engine_in_thread(make_engine)
    done: list[Completion] = []
    link.start(done.append, lambda error: pytest.fail(str(error)))
    assert link.stats.generated_tokens == 0
    link.submit([request(name, 6) for name in "abc"])
    wait_until(lambda: len(done) == 3)
    assert {completion.job_id: completion.text for completion in done} == dict.fromkeys("abc", "ababab")
    wait_until(lambda: link.stats.generated_tokens == 18 and link.stats.free_pages == link.stats.pages)
    link.stop()
    assert not link.alive
    link.submit([request("late", 6)])  # nobody listens, and nobody is hurt


def test_followed_texts_come_as_they_grow_and_before_their_completions() -> None:
    link = engine_in_thread(make_engine)
    events: list[Completion | Delta] = []
    link.start(events.append, lambda error: pytest.fail(str(error)), on_deltas=events.extend)
    assert link.follow(["b", "unknown"])
    link.submit([request(name, 60) for name in "abc"])
    wait_until(lambda: sum(isinstance(event, Completion) for event in events) == 3)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert {delta.job_id for delta in deltas} == {"b"}
    text = ""
    for delta in deltas:
        assert (delta.attempt, delta.start) == (1, len(text))
        text += delta.text
    (completion,) = [event for event in events if isinstance(event, Completion) and event.job_id == "b"]
    assert text and completion.text.startswith(text)
    assert events.index(completion) > events.index(deltas[-1])
    assert link.follow([])
    link.submit([request("b", 60)])
    wait_until(lambda: isinstance(events[-1], Completion) and len(events) == len(deltas) + 4)
    link.stop()


def test_abandoned_work_completes_no_more() -> None:
    link = engine_in_thread(make_engine)
    done: list[Completion] = []
    link.start(done.append, lambda error: pytest.fail(str(error)))
    link.submit([request(f"job-{number}", 90) for number in range(50)])
    dropped = link.abandon()
    assert dropped is not None and len(dropped) + len(done) == 50
    count = len(done)
    link.submit([request("next", 4)])
    wait_until(lambda: any(completion.job_id == "next" for completion in done))
    assert len(done) == count + 1
    link.stop()


def test_an_engine_ends_while_nobody_waits_for_it_and_that_is_no_failure() -> None:
    link = engine_in_thread(make_engine)
    failures: list[RunnerError] = []
    link.start(lambda completion: None, failures.append)
    link.submit([request("a", 90)])
    link.begin_stop()
    wait_until(lambda: not link._host.is_alive())
    assert not link.alive and link.abandon() is None and link.progress(["a"], 1) == []
    for _ in range(2):
        link.stop()
    assert failures == [] and link.stats.sequences


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
    link.submit([request("a", 5)])
    assert reported.wait(120)
    assert not link.alive
    assert link.abandon() is None
    link.stop()
    assert failures == ["the arithmetic gave out"]


class Hanging:
    """An engine behind a link that does not come out of its next step until it is let go."""

    def __init__(self, *, hang_seconds: float) -> None:
        self.engine, self.hangs, self.going_on = make_engine(), threading.Event(), threading.Event()
        self.engine.step = self._hang  # type: ignore[method-assign]
        self.link = engine_in_thread(lambda: self.engine, hang_seconds=hang_seconds)
        self.failures: list[str] = []
        self.failed = threading.Event()
        self.link.start(lambda completion: None, self._on_failure)
        self.link.submit([request("job", 5)])
        assert self.hangs.wait(120)

    def _hang(self) -> list[Completion]:
        self.hangs.set()
        assert self.going_on.wait(240)
        raise RunnerError("killed")  # what becomes of a process; a thread has to end by itself

    def _on_failure(self, error: RunnerError) -> None:
        self.failures.append(str(error))
        self.failed.set()

    def fill_the_pipe(self) -> threading.Thread:
        """Submit until a command does not go through; returns the thread that is stuck with it."""
        filling = threading.Thread(
            target=lambda: [self.link.submit([request(f"job-{n}", 5)]) for n in range(20_000)], daemon=True
        )
        filling.start()
        wait_until(lambda: not self.link._writable(0.0))
        return filling


def test_engine_that_hangs_with_a_full_pipe_is_killed_and_reported_once() -> None:
    hanging = Hanging(hang_seconds=0.4)
    filling = hanging.fill_the_pipe()
    assert hanging.failed.wait(120)
    assert not hanging.link.alive
    assert hanging.link._host.killed  # type: ignore[attr-defined]
    hanging.going_on.set()
    hanging.link.stop()
    filling.join(120)
    assert not filling.is_alive()
    assert hanging.failures == ["it has not answered for 0 s: a step hangs"]


def test_engine_that_hangs_holds_up_nobody_who_asks_or_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "_PATIENCE_SECONDS", 0.2)
    hanging = Hanging(hang_seconds=600.0)
    filling = hanging.fill_the_pipe()
    assert hanging.link.progress(["job"], 1) == []
    assert hanging.link.abandon() is None  # not []: it may drop its work later
    stopping = threading.Thread(target=hanging.link.stop, daemon=True)
    stopping.start()
    wait_until(lambda: not hanging.link.alive)
    hanging.going_on.set()
    for thread in (stopping, filling):
        thread.join(120)
        assert not thread.is_alive()
    assert hanging.failures == []


def test_idle_engine_gives_signs_of_life() -> None:
    link = engine_in_thread(make_engine, hang_seconds=0.2)
    failures: list[RunnerError] = []
    link.start(lambda completion: None, failures.append)
    wait_until(lambda: link._heard > 8)  # in twice the time for which it may be silent
    assert link.alive and failures == []
    assert link._answers.empty()
    link.stop()


def test_news_of_the_loading_are_passed_on_and_whoever_hears_them_may_break_off() -> None:
    ours, theirs = Pipe()
    host = StubHost()
    link = EngineLink(ours, host, hang_seconds=60.0)
    theirs.send(Loading(StartStep.LOADING, "40% of 4.7 GB"))
    heard: list[str] = []

    class NoLongerWantedError(Exception):
        pass

    def while_loading(news: str | None) -> None:
        if news is None:
            raise NoLongerWantedError
        heard.append(news)

    with pytest.raises(NoLongerWantedError):
        link.start(lambda completion: None, lambda error: None, while_loading)
    assert heard == ["40% of 4.7 GB"]
    link.stop()
    assert host.joined == [0.0]  # at once: one that loads reads no commands


class StubHost:
    def __init__(self) -> None:
        self.joined: list[float | None] = []

    def is_alive(self) -> bool:
        return not self.joined

    def join(self, timeout: float | None = None) -> None:
        self.joined.append(timeout)

    def kill(self) -> None:
        raise AssertionError("nothing hangs")
