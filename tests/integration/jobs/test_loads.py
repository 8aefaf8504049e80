"""Loads of models in turn: what SQL says waits, who has what, and which rows a broken model fails."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier

import pytest
from sqlalchemy import select, update

from nightmill.jobs.base.contract import JobState, StopReason, WorkerState
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import DatabaseError, RunnerError
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.loads import FailureKind, Loads, Queue
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.sql.tables import JobRow, LoadRow
from nightmill.worker.service.heart import Heart
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.resting import RestRule
from nightmill.worker.service.sleeping import Sleeper
from nightmill.worker.service.turns.policy import Rules
from nightmill.worker.service.turns.turning import Turn, Turning, register_turn
from nightmill.worker.service.turns.warming import Warmer
from tests.support.servers import Clock

MODELS = {"a": "a.gguf", "b": "b.gguf", "c": "c.gguf"}


def in_turn(client: Client, letter: str, models: dict[str, str] = MODELS) -> tuple[Claims, Turning]:
    """A worker that sleeps and has several models, and what chooses for it."""
    claims = Claims(client.database, letter * 32)
    claims.register("host", 1, next(iter(models)), None)
    claims.register_models([*models], swap_for_interactive=False)
    claims.beat(WorkerState.SLEEPING, "idle, until there are jobs")
    return claims, Turning(Loads(client.database, claims.worker_id), models, Rules())


def load(client: Client, claims: Claims, turning: Turning) -> str | None:
    """Let a worker choose, and load what it has chosen."""
    model = turning.choose()
    if model is not None:
        claims.register("host", 1, model, None)
        Loads(client.database, claims.worker_id).ready()
        claims.beat(WorkerState.READY, stats={"sequences": 2, "in_flight": 0})
    return model


def break_load(client: Client, claims: Claims, kind: FailureKind = FailureKind.FILE) -> None:
    Loads(client.database, claims.worker_id).end("it is no model", kind)


def enqueue(client: Client, model: str | None, count: int = 1, **said: object) -> list[str]:
    return client.enqueue_many([f"{model} {number}" for number in range(count)], model=model, **said)  # type: ignore[arg-type]


def test_queues_say_what_can_be_claimed_now_by_model(client: Client, clock: Clock) -> None:
    claims, _ = in_turn(client, "a")
    began = clock.time
    enqueue(client, "a", 3)
    clock.advance(seconds=10)
    enqueue(client, "a", priority=7, deadline=timedelta(hours=2))
    enqueue(client, "b", scheduled_at=timedelta(hours=1))
    enqueue(client, None, 2)
    client.enqueue("now", model="c", interactive=True, deadline=timedelta(seconds=60))
    clock.advance(seconds=10)
    loads = Loads(client.database, claims.worker_id)
    found = loads.queues(("a", "b", "c", None))
    assert found["a"] == Queue("a", 4, 7, began, began + timedelta(seconds=10, hours=2))
    assert found[None] == Queue(None, 2, 5, began + timedelta(seconds=10))
    assert found["c"] == Queue("c", 1, 5, began + timedelta(seconds=10), None, 1)
    assert set(loads.queues(("b",))) == set()
    clock.advance(hours=1)
    assert found["a"] != loads.queues(("b",))["b"] and loads.queues(("b",))["b"].rows == 1


def test_of_two_workers_at_once_one_takes_the_model_with_the_last_rows(client: Client) -> None:
    workers = [in_turn(client, letter) for letter in "abcd"]
    enqueue(client, "b", 10)
    together = Barrier(len(workers))

    def choose(worker: tuple[Claims, Turning]) -> str | None:
        together.wait(120)
        return worker[1].choose()

    with ThreadPoolExecutor(len(workers)) as pool:
        found = list(pool.map(choose, workers))
    assert sorted(map(str, found)) == ["None", "None", "None", "b"]
    enqueue(client, "a", 3)
    others = [turning for (_, turning), model in zip(workers, found, strict=True) if model is None]
    assert [turning.choose() for turning in others] == ["a", None, None]


def test_more_rows_than_those_who_have_a_model_take_soon_are_for_others_too(client: Client) -> None:
    (one, first), (_, second) = in_turn(client, "a"), in_turn(client, "b")
    enqueue(client, "a", 8)
    assert load(client, one, first) == "a"  # with two slots
    assert second.choose() is None
    enqueue(client, "a")
    assert second.choose() == "a"


def test_a_worker_that_is_given_up_holds_no_model(client: Client, clock: Clock) -> None:
    (one, first), (other, second) = in_turn(client, "a"), in_turn(client, "b")
    enqueue(client, "a", 2)
    assert load(client, one, first) == "a" and second.choose() is None
    clock.advance(seconds=client.settings.stale_seconds + 1)
    other.beat(WorkerState.SLEEPING)
    assert second.choose() == "a"


def test_a_broken_model_fails_its_rows_after_their_attempts_and_no_others(
    client: Client, clock: Clock
) -> None:
    claims, turning = in_turn(client, "a")
    others = enqueue(client, "b", 2)
    rows = enqueue(client, "a", 3)
    with client.database.write() as connection:
        connection.execute(update(JobRow).where(JobRow.id == rows[0]).values(max_attempts=2))
    chosen = []
    for _ in range(3):
        clock.advance(seconds=60)
        chosen.append(turning.choose())
        if chosen[-1] == "a":
            break_load(client, claims)
        else:
            Loads(client.database, claims.worker_id).ready()
            for one in others:
                client.cancel(one)
    assert chosen == ["a", "b", "a"]
    clock.advance(seconds=60)
    assert turning.choose() == "a"  # two have an attempt left
    first, *rest = (client.get(job_id) for job_id in rows)
    assert (first.state, first.stop_reason) == (JobState.FAILED, StopReason.ERROR)
    assert first.error == "the model 'a' could not be loaded, 2 times; the last: it is no model"
    assert {job.state for job in rest} == {JobState.QUEUED}
    assert turning.trouble == "a could not be loaded, and is tried again: it is no model"
    break_load(client, claims)
    clock.advance(seconds=60)
    assert turning.choose() is None and turning.trouble is None
    assert {client.get(job_id).state for job_id in rows} == {JobState.FAILED}
    # Rows that come later have attempts of their own: the file may be another by then.
    later = enqueue(client, "a")
    assert turning.choose() == "a"
    Loads(client.database, claims.worker_id).ready()
    assert client.get(later[0]).state is JobState.QUEUED


def test_where_no_model_was_ever_loaded_no_row_is_charged_with_that(client: Client, clock: Clock) -> None:
    claims, turning = in_turn(client, "a")
    (row,) = enqueue(client, "a")
    for _ in range(4):
        clock.advance(seconds=600)
        assert turning.choose() == "a"
        break_load(client, claims, FailureKind.RUNNER)
    assert turning.choose() is None  # not yet again
    assert client.get(row).state is JobState.QUEUED
    enqueue(client, "b")
    assert load(client, claims, turning) == "b"  # so it is not the GPU
    clock.advance(seconds=600)
    turning.choose()
    assert client.get(row).state is JobState.FAILED


def test_a_network_that_is_away_fails_no_row(client: Client, clock: Clock) -> None:
    claims, turning = in_turn(client, "a")
    (row,) = enqueue(client, "a")
    enqueue(client, "b", 2)
    assert load(client, claims, turning) == "b"
    for _ in range(4):
        clock.advance(seconds=6000)
        Loads(client.database, claims.worker_id).begin(lambda held: ("a", "by hand"))
        break_load(client, claims, FailureKind.FETCH)
    turning.choose()
    assert client.get(row).state is JobState.QUEUED


def test_another_worker_that_may_still_load_a_model_keeps_its_rows(client: Client, clock: Clock) -> None:
    (one, first), (other, second) = in_turn(client, "a"), in_turn(client, "b")
    (row,) = enqueue(client, "a")
    for claims, turning, state in (
        (one, first, JobState.QUEUED),
        (other, second, JobState.FAILED),
    ):
        for _ in range(3):
            clock.advance(seconds=3600)
            for each in (one, other):
                each.beat(WorkerState.SLEEPING)
            assert turning.choose() == "a"
            break_load(client, claims)
        turning.choose()
        assert client.get(row).state is state


def test_a_load_is_as_long_as_the_last_one_took_and_ends_with_the_turn(
    client: Client, clock: Clock, tmp_path: Path
) -> None:
    claims, turning = in_turn(client, "a")
    enqueue(client, "a")
    loads = Loads(client.database, claims.worker_id)
    assert turning.choose() == "a" and loads.seconds(["a", "b"]) == {}
    clock.advance(seconds=42)
    loads.ready()
    assert loads.seconds(["a", "b"]) == {"a": 42.0}
    clock.advance(seconds=100)
    loads.end()
    with client.database.read() as connection:
        (row,) = connection.execute(select(LoadRow.__table__)).all()
    assert (row.model, row.worker, row.error) == ("a", claims.worker_id, None)
    assert (row.ended_at - row.began_at).total_seconds() == 142.0 and row.reason.startswith(
        "1 row waits since"
    )
    assert turning.choose() == "a"  # a turn that does not end
    clock.advance(days=40)
    client.prune(timedelta(days=30))
    with client.database.read() as connection:
        assert connection.execute(select(LoadRow.ended_at)).scalars().all() == [None]


def test_who_sleeps_with_several_models_wakes_for_the_one_that_has_rows(client: Client) -> None:
    claims, turning = in_turn(client, "a")
    rule = RestRule(claims, client.settings, (None, *MODELS))
    sleeper = Sleeper(rule, claims, Heart(claims, 30.0), Sweep(client.database), 5.0, turning)
    assert not sleeper.look(0.0)
    (worker,) = client.workers()
    assert worker.wakes_for_jobs and worker.models == [*MODELS]
    enqueue(client, "c")
    client.worker_store.pause()
    assert not sleeper.look(1.0) and sleeper.turn is None
    client.worker_store.pause(paused=False)
    assert sleeper.look(1000.0) and sleeper.turn == "c"
    assert client.workers()[0].model == "c"


def test_models_that_a_worker_could_load_are_known_and_served_by_nobody_yet(client: Client) -> None:
    claims, turning = in_turn(client, "a")
    enqueue(client, "b")  # known, though no worker has ever had it loaded
    assert load(client, claims, turning) == "b"
    assert [worker.model for worker in client.worker_store.serving("b")] == ["b"]
    assert client.worker_store.serving("c") == []
    assert [worker.id for worker in client.worker_store.could_serve("c")] == [claims.worker_id]
    assert client.worker_store.could_serve("d") == []
    claims.sign_off()
    assert client.worker_store.could_serve("c") == []


def test_a_turn_ends_when_its_rows_have_and_reads_the_next_weights_before(
    client: Client, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: tmp_path / f"{name}.gguf" for name in MODELS}
    for path in files.values():
        path.write_bytes(b"weights")
    claims, turning = in_turn(client, "a", {name: str(path) for name, path in files.items()})
    warmed: list[tuple[str, list[Path]]] = []
    monkeypatch.setattr(Warmer, "warm", lambda self, model, paths: warmed.append((model, list(paths))))
    listed = ",".join(f"{name}={path}" for name, path in files.items())
    settings = client.settings.model_copy(update={"models": listed})
    rows = enqueue(client, "a", 2)
    enqueue(client, "b", 5)
    assert load(client, claims, turning) == "b"
    turn, in_flight = Turn(claims, settings, "b"), InFlight(8)
    assert turn.look(in_flight) is None  # it is not ready
    turn.ready()
    assert turn.look(in_flight) is None and warmed == []  # its rows wait
    taken = claims.claim([job.id for job in client.list_jobs(model="b", limit=9)])
    in_flight.reserve(len(taken))
    assert in_flight.fill(len(taken), taken)
    turn._look_at = turn._rested_at = 0.0  # it looks every few seconds
    assert turn.look(in_flight) is None and warmed == [("a", [files["a"]])]
    in_flight.remove([(claim.job_id, claim.attempt) for claim in taken])
    turn._rested_at = 0.0
    assert turn.look(in_flight) is None  # a's rows have only just come
    clock.advance(seconds=60)
    turn._rested_at = 0.0
    said = turn.look(in_flight)
    assert said is not None and said.startswith("a is next: 2 rows wait since ")
    turn.end()
    assert turning.choose() == "a" and client.get(rows[0]).state is JobState.QUEUED
    assert turn.failed(DatabaseError("is away")) is None and turn.failed(KeyboardInterrupt()) is None
    assert turn.failed(RunnerError("no memory is left")) == "b could not be loaded: no memory is left"


def beside(client: Client, letter: str, model: str, group: str | None = "9" * 32) -> tuple[Loads, Turn]:
    """A worker that is ready with its one model, and shares its GPU with others of the group."""
    claims = Claims(client.database, letter * 32)
    claims.register("host", 1, model, "GPU 0")
    settings = client.settings.model_copy(update={"models": f"{model}={model}.gguf"})
    turn = register_turn(claims, settings, model, group)
    assert turn is not None
    turn.ready()
    claims.beat(WorkerState.READY)
    return Loads(client.database, claims.worker_id), turn


def test_of_models_on_one_gpu_the_less_urgent_one_takes_no_more_rows(client: Client) -> None:
    (loads, a), (_, b), (_, alone) = (
        beside(client, *said) for said in (("a", "a"), ("b", "b"), ("c", "c", None))
    )
    assert loads.beside() == ["b"] and not (a.yields() or b.yields())
    (low,) = enqueue(client, "a", priority=4)
    assert not (a.yields() or b.yields())  # nothing waits for the other
    enqueue(client, "b", priority=6)
    enqueue(client, "c", priority=9)
    assert a.yields() and not b.yields() and not alone.yields()
    enqueue(client, "a", interactive=True)  # which comes in another way
    assert a.yields()
    (any_model,) = enqueue(client, None, priority=7)  # for either, so neither waits for the other
    assert not (a.yields() or b.yields())
    client.cancel(any_model)
    assert a.yields()
    Claims(client.database, "b" * 32).beat(WorkerState.DRAINING)  # it takes none itself
    assert loads.beside() == [] and not a.yields()
    assert client.get(low).state is JobState.QUEUED


def test_a_model_that_loads_beside_another_proves_that_it_is_not_the_gpu(client: Client) -> None:
    claims = Claims(client.database, "d" * 32)
    claims.register("host", 1, "d", "GPU 0")
    settings = client.settings.model_copy(update={"models": "d=d.gguf", "max_attempts": 1})
    enqueue(client, "d", max_attempts=1)
    turn = register_turn(claims, settings, "d", "9" * 32)
    assert turn is not None
    said = turn.failed(RunnerError("a kernel cannot be compiled"))
    assert said == "d could not be loaded: a kernel cannot be compiled"
    turning = Turning(Loads(client.database, "d" * 32), {"d": "d.gguf"}, Rules())
    assert turning.choose() is None  # for a while: the next try is later
    assert client.stats()["state"] == {"queued": 1}
    beside(client, "a", "a")
    turning.choose()
    assert client.stats()["state"] == {"failed": 1}


def test_a_start_beside_others_is_a_load_and_a_wake_goes_on_with_what_was_chosen(client: Client) -> None:
    _, turn = beside(client, "a", "a")
    turn.begin()  # the same process registers twice where its model has to be fetched first
    with client.database.read() as connection:
        rows = connection.execute(select(LoadRow.model, LoadRow.reason, LoadRow.ready_at)).all()
    assert [(row.model, row.reason) for row in rows] == [("a", "is loaded together with others")]
    assert rows[0].ready_at is not None
