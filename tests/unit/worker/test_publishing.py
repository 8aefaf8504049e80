"""Texts that are followed while a worker generates them: pieces through a real Redis, ends from rows."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest

from nightmill.jobs.base.contract import CallFormat, JobState, Markup
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import JobNotFoundError, NightmillError, StreamChangedError, WaitTimeoutError
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.streams.pieces import Piece
from nightmill.jobs.streams.redis import Followers, TextChunk
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Delta
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.publishing import Publisher
from tests.support.servers import Clock, RedisServer, wait_until
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.bench import Bench, Pausing, stop
from tests.unit.worker.interrupted import LONG, undisturbed

PATIENCE = 60.0
MARKUP = Markup(CallFormat.HERMES, ("<think>", "</think>"), opened=True)


class Slow(ScriptedRunner):
    """Takes its time for each step, as a GPU does."""

    def launch(self, batch: Any) -> None:
        time.sleep(0.01)
        super().launch(batch)


def hold(bench: Bench, tokens: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have the engine draw so many tokens and, until the event is set, no more; it goes on to listen."""
    step, go_on = bench.engine.step, threading.Event()

    def held() -> Any:
        held_back = bench.engine.stats.generated_tokens >= tokens and not go_on.is_set()
        return [] if held_back else step()

    monkeypatch.setattr(bench.engine, "step", held)
    return go_on


class Reading:
    """Somebody who reads a stream to its end, on a thread."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self.pieces: list[Piece] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(pieces,), daemon=True)
        self._thread.start()

    def _read(self, pieces: Iterator[Piece]) -> None:
        try:
            for piece in pieces:
                self.pieces.append(piece)
        except Exception as error:
            self.error = error

    def text(self) -> str:
        """All of it, at the end; raises what the stream raised."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        places = [piece.place.characters for piece in self.pieces]
        assert places == sorted(set(places)), "no piece is empty or comes twice"
        return "".join(self.pieces)


def test_pieces_come_while_the_text_is_generated_and_joined_are_the_rows_text(
    build: Callable[..., Bench],
) -> None:
    bench = build(Slow())
    ids = [bench.client.enqueue("prompt", seed=seed, **LONG) for seed in range(4)]
    readings = [Reading(bench.client.stream(job_id)) for job_id in ids for _ in range(2)]
    wait_until(lambda: len(bench.client.following._readers) == 8)
    bench.run(ids)
    for number, reading in enumerate(readings):
        assert reading.text() == bench.client.get(ids[number // 2]).text == undisturbed(number // 2)[1]
        assert len(reading.pieces) > 1
    wait_until(lambda: not bench.engine.followed)


def test_who_comes_late_has_the_text_from_its_beginning_and_who_comes_back_goes_on(
    build: Callable[..., Bench],
) -> None:
    bench = build(Pausing())
    job_id = bench.client.enqueue("prompt", seed=3, **LONG)
    thread = bench.run([job_id])
    wait_until(lambda: len(bench.runner.batches) == 40)
    early = bench.client.stream(job_id, timeout=PATIENCE)
    bench.runner.gate.set()
    text = undisturbed(3)[1]
    first = next(early)
    assert text.startswith(first)
    early.close()  # type: ignore[attr-defined]
    rest = "".join(bench.client.stream(job_id, after=first.place))
    assert first + rest == text
    thread.join()
    assert "".join(bench.client.stream(job_id, after=str(first.place))) == rest
    assert "".join(bench.client.stream(job_id)) == text


@pytest.mark.parametrize("changed", [False, True])
def test_another_worker_goes_on_with_the_text_and_only_another_text_is_an_error(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    leaving = build(ScriptedRunner())
    hold(leaving, 60, monkeypatch)
    job_id = leaving.client.enqueue("prompt", seed=7, **LONG)
    reading = Reading(leaving.client.stream(job_id))
    leaving.run([job_id])
    wait_until(lambda: reading.pieces)
    stop(leaving)
    runner = ScriptedRunner()
    if changed:
        runner.arithmetic = replace(runner.arithmetic, device="another")
        runner.choose = lambda seed, tokens, allowed: 0  # type: ignore[method-assign]
    other = build(runner, name="b")
    other.service.run_shard([job_id])
    if changed:
        with pytest.raises(StreamChangedError):
            reading.text()
        assert set(leaving.client.get(job_id).text or "") == {"a"}
    else:
        assert reading.text() == leaving.client.get(job_id).text == undisturbed(7)[1]


def test_a_killed_workers_text_is_gone_on_with(
    build: Callable[..., Bench], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was saved: the next worker draws the tokens again that were read already."""
    doomed = build(Slow())
    hold(doomed, 60, monkeypatch)
    job_id = doomed.client.enqueue("prompt", seed=9, **LONG)
    reading = Reading(doomed.client.stream(job_id))
    wait_until(lambda: doomed.client.following._readers)
    doomed.run([job_id])
    wait_until(lambda: reading.pieces)
    clock.advance(3600)
    other = build(Slow(), name="b")
    assert Sweep(other.claims.database).rescue(timedelta(seconds=30)) == [job_id]
    other.suspects.look()
    assert reading.text() == undisturbed(9)[1]


def test_a_retried_job_is_followed_anew(build: Callable[..., Bench]) -> None:
    bench = build(Pausing())
    job_id = bench.client.enqueue("prompt", seed=2, **LONG)
    reading = Reading(bench.client.stream(job_id))
    thread = bench.run([job_id])
    wait_until(lambda: len(bench.runner.batches) == 40)
    bench.client.cancel(job_id)
    bench.service.poll_cancellations()
    bench.runner.gate.set()
    thread.join()
    kept = reading.text()
    assert kept == bench.client.get(job_id).text and undisturbed(2)[1].startswith(kept)
    last = reading.pieces[-1].place
    bench.client.retry(job_id)
    again = Reading(bench.client.stream(job_id, after=last))
    bench.service.run_shard([job_id])
    assert kept + again.text() == undisturbed(2)[1]


def test_without_redis_the_text_comes_whole_and_with_it_again_in_pieces(
    redis_server: RedisServer, sqlite_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = sqlite_settings.model_copy(update={"broker_url": redis_server.url})
    with Client(settings) as client:
        bench = Bench(client, ScriptedRunner())
        jobs = [client.enqueue("prompt", seed=seed, **LONG) for seed in range(2)]
        redis_server.stop()
        first = Reading(client.stream(jobs[0]))
        bench.service.run_shard(jobs[:1])
        assert first.text() == undisturbed(0)[1]
        assert len(first.pieces) == 1
        redis_server.start()
        go_on = hold(bench, 180, monkeypatch)
        second = Reading(client.stream(jobs[1]))
        bench.run(jobs[1:])
        wait_until(lambda: second.pieces)
        redis_server.restart()
        go_on.set()
        assert second.text() == undisturbed(1)[1]
        stop(bench)


def test_jobs_that_nobody_follows_are_not_told(
    build: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = build(ScriptedRunner())
    monkeypatch.setattr(Engine, "deltas", lambda self: pytest.fail("asked for nobody"))
    sent: list[Any] = []
    monkeypatch.setattr(bench.service._publisher._followers, "send", sent.append)
    ids = [bench.client.enqueue("prompt", seed=seed, **LONG) for seed in range(4)]
    bench.service.run_shard(ids)
    assert {bench.client.get(job_id).state for job_id in ids} == {JobState.SUCCEEDED}
    assert sent == []


def test_an_engine_that_was_not_told_what_is_followed_is_told_at_the_next_look() -> None:
    class Held:
        idle = False

        def keys(self) -> list[tuple[str, int]]:
            return [("j", 1)]

        def markup(self, key: tuple[str, int]) -> Markup | None:
            return MARKUP if key == ("j", 1) else None

    class Watching(Followers):
        def __init__(self) -> None:
            self.sent: list[TextChunk] = []

        def look(self) -> Mapping[str, Mapping[str, str]]:
            return {"f": {"j:1": "j"}}

        def send(self, parts: Mapping[str, Iterable[TextChunk]]) -> None:
            self.sent += parts["f"]

        def close(self) -> None:
            pass

    told: list[list[str]] = []

    def follow(job_ids: Sequence[str]) -> bool:
        told.append(list(job_ids))
        if len(told) > 1:
            publisher.add_deltas([Delta("j", 1, 0, "once")])
        return len(told) > 1

    followers = Watching()
    publisher = Publisher(followers, cast(InFlight, Held()), follow, pytest.fail, lambda _: (b"", ""))
    publisher.start()
    publisher.began()
    wait_until(lambda: bool(followers.sent))
    publisher.close()
    assert told == [["j"], ["j"]]
    assert followers.sent == [TextChunk("j:1", 0, "once", MARKUP)]


def test_a_reader_of_a_client_that_is_closed_is_told(sqlite_settings: Settings) -> None:
    client = Client(sqlite_settings)
    job_id = client.enqueue("prompt")
    reading = Reading(client.stream(job_id))
    wait_until(lambda: bool(client.following._readers))
    client.close()
    for text in (reading.text, Reading(client.stream(job_id)).text):
        with pytest.raises(NightmillError, match="the client is closed"):
            text()


def test_a_stream_ends_in_time_and_for_no_unknown_job(sqlite_client: Client) -> None:
    job_id = sqlite_client.enqueue("prompt")
    with pytest.raises(WaitTimeoutError):
        list(sqlite_client.stream(job_id, timeout=0.05))
    with pytest.raises(JobNotFoundError):
        list(sqlite_client.stream("0" * 32))
    sqlite_client.cancel(job_id)
    assert list(sqlite_client.stream(job_id)) == []
