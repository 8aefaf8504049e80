"""What the campaign suspends, freezes, fills and sets wrong: it does so, and undoes it."""

import errno
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sqlalchemy import create_engine, text

from nightmill.jobs.base.settings import Settings
from tests.campaign import file_night
from tests.campaign.clocks import HOUR, PostgresClock
from tests.campaign.disk import Disk
from tests.campaign.plan import (
    ENDINGS,
    FAULTS,
    HANGS,
    KILLS,
    LONGEST_HANG,
    ONLY,
    SHORTEST_HANG,
    kinds,
    last_hang,
    make_plan,
)
from tests.campaign.proxies import Proxies
from tests.campaign.report import Report
from tests.support.freezing import Freeze
from tests.support.needs import Need, missing

pytestmark = pytest.mark.heavy

UNDO = {
    "redis_pause": "redis_continue",
    "redis_deaf": "redis_hears",
    "redis_freeze": "redis_hears",
    "postgres_pause": "postgres_continue",
    "postgres_deaf": "postgres_hears",
    "postgres_freeze": "postgres_hears",
    "freeze_server": "thaw_server",
    "hang_engine": "continue_engine",
}


@pytest.mark.parametrize("part", ONLY)
def test_hangs_last_1_to_60_seconds_and_shorter_in_a_short_campaign(part: str) -> None:
    for seconds, longest in ((3000.0, LONGEST_HANG), (20.0, 6.0)):
        lasted = []
        for seed in range(3, 9):  # a short campaign has few of them
            plan = make_plan(seed, part, seconds, 3)
            for index, action in enumerate(plan):
                if action.name in UNDO:
                    end = next(
                        later
                        for later in plan[index:]
                        if (later.name, later.number) == (UNDO[action.name], action.number)
                    )
                    lasted.append(end.at - action.at)
        assert lasted and min(lasted) >= SHORTEST_HANG and max(lasted) <= longest + 0.001
    assert max(lasted) > 3.0


@pytest.mark.parametrize("part", ONLY)
def test_the_last_hang_comes_from_the_seed(part: str) -> None:
    assert last_hang(5, part) == last_hang(5, part)
    assert {last_hang(seed, part).name for seed in range(60)} == {
        name for name in ENDINGS if part == "postgresql" or not name.startswith("postgres_")
    }


@pytest.mark.parametrize("part", ONLY)
def test_somebody_is_asked_to_end_beside_many_hangs(part: str) -> None:
    plan = make_plan(11, part, 2000.0, 3)
    beside = 0
    for index, action in enumerate(plan):
        if action.name not in UNDO:
            continue
        end = next(later.at for later in plan[index:] if later.name == UNDO[action.name])
        beside += any(
            later.name in ("terminate", "terminate_server") and later.at < end for later in plan[index:]
        )
    assert beside > len([action for action in plan if action.name in UNDO]) / 4


def test_every_fault_has_a_method_and_every_kill_and_hang_is_a_fault() -> None:
    from tests.campaign.faults import Faults

    for part in ONLY:
        for action in make_plan(1, part, 300.0, 3):
            assert callable(getattr(Faults, action.name))
    assert FAULTS | set(file_night.DISTURBANCES) >= KILLS | HANGS
    assert not KILLS & HANGS


def test_what_disturbs_a_run_is_drawn_before_it_begins() -> None:
    plans = [file_night.make_plan(random.Random(number)) for number in range(50)]
    assert plans == [file_night.make_plan(random.Random(number)) for number in range(50)]
    assert {one.name for plan in plans for one in plan} == set(file_night.DISTURBANCES)


def test_the_table_counts_kills_and_hangs_and_says_what_was_never_reached() -> None:
    report = Report(1)
    report.part = "sqlite"
    report.planned(kinds("sqlite"))
    report.count("fault kill_worker", 3)
    report.count("fault redis_deaf", 2)
    report.count("fault poison")
    assert (report.kills, report.hangs) == (3, 2)
    summary = report.summary()
    assert "kills 3, hangs 2" in summary
    never = next(line for line in summary.splitlines() if "never reached" in line)
    assert "sqlite: redis_pause" in never and "kill_worker" not in never and "postgres_pause" not in never


def _says(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
        connection.sendall(b"a")
        try:
            return connection.recv(1) == b"a"
        except TimeoutError:
            return False


def test_a_proxy_of_another_process_is_deaf_until_it_is_thawed(echo: tuple[str, int]) -> None:
    with Proxies({"redis": echo, "postgres": echo}) as proxies:
        assert _says(proxies.ports["redis"])
        proxies.freeze("redis", Freeze.ACKNOWLEDGED, new=True)
        assert not _says(proxies.ports["redis"])
        assert _says(proxies.ports["postgres"])
        proxies.thaw("redis")
        assert _says(proxies.ports["redis"])
        process = psutil.Process(proxies._process.pid)
    assert not process.is_running()


def test_a_disk_is_full_until_it_is_freed(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk") as disk:
        if not disk.mounted:
            assert not disk.fill()
            missing(Need.MOUNT)
        file = disk.path / "file"
        file.write_bytes(b"x")
        assert disk.fill()
        with pytest.raises(OSError, match="No space") as raised:
            file.write_bytes(bytes(1 << 20))
        assert raised.value.errno == errno.ENOSPC
        disk.free()
        file.write_bytes(bytes(1 << 20))
    assert (tmp_path / "disk-kept" / "file").stat().st_size == 1 << 20, "kept for a closer look"
    assert not os.path.ismount(tmp_path / "disk")


def test_postgresql_has_another_time_for_nightmill_than_for_the_history(postgres_settings: Settings) -> None:
    first = create_engine(postgres_settings.resolved_database_url)
    clock = PostgresClock(first)
    first.dispose()  # the search path holds for new sessions
    engine = create_engine(postgres_settings.resolved_database_url)
    ahead = text("SELECT extract(epoch FROM clock_timestamp() - pg_catalog.clock_timestamp())")
    for seconds in (HOUR, -HOUR, 0.0):
        clock.step(seconds)
        with engine.connect() as connection:
            assert abs(float(connection.execute(ahead).scalar_one()) - seconds) < 60.0
    first.dispose()
    engine.dispose()


def test_a_program_of_ours_reads_a_stepped_clock_and_meets_a_stale_folder(tmp_path: Path) -> None:
    program = (
        "import errno, os, sys\n"
        "from datetime import UTC, datetime\n"
        "import nightmill.jobs.sql.database as database\n"
        "from tests.campaign import clocks, worker\n"
        "clocks.install(); worker._answer_stale()\n"
        "print(round((database.datetime.now(UTC) - datetime.now(UTC)).total_seconds()))\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(open(path).read())\n"
        "    except OSError as error: print(errno.errorcode[error.errno])\n"
    )
    folder, other = tmp_path / "files", tmp_path / "other"
    folder.mkdir()
    (folder / "a").write_text("inside")
    other.write_text("outside")
    clock, marker = tmp_path / "clock", tmp_path / "marker"
    environment = os.environ | {
        "CAMPAIGN_HOST_CLOCK": str(clock),
        "CAMPAIGN_STALE": str(marker),
        "CAMPAIGN_FILES": str(folder),
    }

    def said() -> list[str]:
        command = [sys.executable, "-c", program, str(folder / "a"), str(other)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    assert said() == ["0", "inside", "outside"]
    clock.write_text("-3600")
    marker.touch()
    assert said() == ["-3600", "ESTALE", "outside"]
