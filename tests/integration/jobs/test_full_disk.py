"""A disk for results that is full: what finds no room is written later, and no second copy is needed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.batches.result_files import destinations, vet
from nightmill.jobs.batches.streaming import ResultStream
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import BatchFileUnavailableError
from nightmill.jobs.formats import InputFile
from nightmill.jobs.formats.places import OnThisDisk
from nightmill.jobs.sql.claims import Claims
from nightmill.worker.commands.run import _finish, _update
from tests.campaign.disk import Disk
from tests.integration.jobs.batches.rows import finish
from tests.support.needs import Need, missing
from tests.support.servers import Clock

ROWS = 150
INPUTS = {
    "in.jsonl": ("", '{"prompt": "row NUMBER LONG"}\n', '{"prompt": 1}\n'),
    "in.csv": ("prompt,max_tokens\n", "row NUMBER LONG,3\n", "row,none\n"),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path / "disk") as made:
        if not made.mounted:
            missing(Need.MOUNT)
        yield made


@pytest.fixture
def client(sqlite_settings: Settings, clock: Clock) -> Iterator[Client]:
    with Client(sqlite_settings, clock=clock) as made:
        yield made


@pytest.fixture(params=sorted(INPUTS))
def batch(request: pytest.FixtureRequest, client: Client, tmp_path: Path) -> Batch:
    head, row, bad = INPUTS[request.param]
    path = tmp_path / str(request.param)
    rows = (bad if n == 7 else row.replace("NUMBER", str(n)) for n in range(1, ROWS + 1))
    path.write_text(head + "".join(rows).replace("LONG", "long " * 100))
    return client.submit_batch(path, name="night")


@pytest.fixture
def stream(batch: Batch, disk: Disk) -> Iterator[ResultStream]:
    source = InputFile(str(batch.record.source))
    places = [OnThisDisk(disk.path / f"{stem}{source.path.suffix}") for stem in ("out", "failed")]
    with destinations(source, *places, overwrite=False) as files:
        for file in files:
            vet(file, batch.store, batch.name, batch.record.fingerprint)
        with ResultStream(batch, *files) as made:
            yield made


def work(client: Client, clock: Clock, count: int) -> None:
    worker = Claims(client.database, "a" * 32)
    if not client.workers():
        worker.register("host", 1, "model", None)
    queued = client.list_jobs(batch="night", state="queued", limit=ROWS)
    finish(worker, queued[:count])  # the newest first: not in the order of the input
    clock.advance(1)


def lines(batch: Batch, disk: Disk) -> list[str]:
    return next(disk.path.glob("out.*")).read_text().splitlines()


def test_what_a_full_disk_does_not_take_is_written_once_there_is_room(
    client: Client, clock: Clock, batch: Batch, disk: Disk, stream: ResultStream, tmp_path: Path
) -> None:
    work(client, clock, 20)
    assert _update(stream) == ""
    disk.fill()
    work(client, clock, ROWS)
    for _ in range(3):
        assert "out" in (said := _update(stream)) and "No space left on device" in said
    assert batch.status().state.final
    disk.free()
    assert _update(stream) == ""
    header = 1 if batch.format == "csv" else 0
    assert len(lines(batch, disk)) == len(set(lines(batch, disk))) == ROWS - 1 + header
    assert stream.finish() == (ROWS - 1, 1) and stream.in_order
    batch.write_results(tmp_path / f"again.{batch.format}")
    assert lines(batch, disk) == (tmp_path / f"again.{batch.format}").read_text().splitlines()


def test_results_that_are_whole_need_no_room_for_a_copy_at_the_end(
    client: Client, clock: Clock, batch: Batch, disk: Disk, stream: ResultStream
) -> None:
    work(client, clock, 20)
    stream.update()
    work(client, clock, ROWS)
    stream.update()
    disk.fill()
    said: list[str] = []
    _finish(stream, said.append)
    assert "no room to put the results in the order" in said[0] and len(said) == 1
    found = lines(batch, disk)
    assert len(set(found)) == ROWS - 1 + (batch.format == "csv")
    disk.free()
    _finish(stream, said.append)  # as the same command does later
    assert len(said) == 1
    assert lines(batch, disk) != found and sorted(lines(batch, disk)) == sorted(found)


def test_a_file_that_lacks_rows_is_not_taken_for_whole(
    client: Client, clock: Clock, batch: Batch, disk: Disk, stream: ResultStream
) -> None:
    work(client, clock, 20)
    stream.update()
    disk.fill()
    work(client, clock, ROWS)
    assert client.list_jobs(batch="night", state=str(JobState.QUEUED)) == []
    with pytest.raises(BatchFileUnavailableError, match="No space left"):
        stream.finish()
