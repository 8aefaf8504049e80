"""One GPU, shared by engines: sums of time and energy, deaths, and a lock whose holder stands still."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nightmill.worker.assembly import shared_gpu
from nightmill.worker.assembly.shared_gpu import SharedGpu, new_ledger
from nightmill.worker.engine.metering import Metering
from tests.unit.engine.test_metering import Device, sequence, step

# An engine of another process: says that it has work, and is then killed, or stands still with the lock.
OTHER = """
import sys, time
from nightmill.worker.assembly.shared_gpu import SharedGpu
class Zero:
    def joules(self): return 0.0
other = SharedGpu(int(sys.argv[1]), None, now=lambda: float(sys.argv[3]))
other.begin()
if sys.argv[2] == "holds":
    other._lock_all()
print("has work", flush=True)
time.sleep(600)
"""


@pytest.fixture
def ledger() -> Iterator[int]:
    descriptor = new_ledger()
    yield descriptor
    os.close(descriptor)


def test_whoever_has_work_shares_time_and_energy_and_the_sums_are_the_devices(ledger: int) -> None:
    device = Device()
    engines = [SharedGpu(ledger, device, device.clock) for _ in range(3)]
    draw = random.Random(0)
    working: set[int] = set()
    seconds, joules = [0.0] * 3, [0.0] * 3  # that each is to have
    for _ in range(2000):
        took, watts = draw.uniform(0.0, 0.3), draw.uniform(50.0, 700.0)
        device.work(took, watts)
        for number in working:
            seconds[number] += took / len(working)
            joules[number] += took * watts / len(working)
        number = draw.randrange(3)
        if number in working:
            engines[number].joules()
            engines[number].rest()
            working.remove(number)
        else:
            engines[number].begin()
            working.add(number)
        if draw.random() < 0.5:
            engines[draw.randrange(3)].clock()
        # Read at each change, which is when shares change, so each has its own to the last bit of a joule.
        for one in sorted(working):
            engines[one].joules()
    assert [one.clock() for one in engines] == pytest.approx(seconds)
    assert [one.joules() for one in engines] == pytest.approx(joules, abs=1.0)
    for one in engines:
        one.close()


def test_rows_of_two_engines_at_once_have_the_energy_of_the_counter(ledger: int) -> None:
    device = Device()
    shared = [SharedGpu(ledger, device, device.clock) for _ in range(2)]
    meters = [Metering(one, one.clock, one) for one in shared]
    rows = [sequence(number) for number in range(2)]
    device.work(60.0, 80.0)  # idle
    before, began = device.energy, device.now
    meters[0].begin()
    for turn in range(600):
        if turn == 200:
            meters[1].begin()
        device.work(0.05, 300.0 if turn < 200 else 600.0)
        meters[0].end(step([rows[0]]))
        if turn >= 200:
            meters[1].end(step([rows[1]]))
    for meter in meters:
        meter.rest()
    consumed, took = device.energy - before, device.now - began
    device.work(60.0, 80.0)
    assert sum(row.joules for row in rows) == pytest.approx(consumed, rel=0.01)
    assert sum(row.seconds for row in rows) == pytest.approx(took)
    assert (rows[0].seconds, rows[1].seconds) == pytest.approx((20.0, 10.0), abs=0.1)
    assert rows[1].joules == pytest.approx(6000.0, rel=0.02)  # half of 600 W for 20 s
    assert meters[0].joules == pytest.approx(rows[0].joules)


@pytest.mark.parametrize("how", ["dies", "holds"])
def test_an_engine_that_died_has_no_share_and_one_that_stands_still_holds_up_nobody(
    ledger: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_gpu, "_PATIENCE_SECONDS", 0.01)
    device = Device()
    own = SharedGpu(ledger, device, device.clock)
    own.begin()
    command = [sys.executable, "-c", OTHER, str(ledger), how, str(device.now)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[ledger]) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"has work\n"
            device.work(10.0, 300.0)
            held = own.clock()
            assert held == pytest.approx(5.0 if how == "dies" else 0.0)
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait()
    own.joules()
    device.work(10.0, 300.0)
    # Nobody knows when exactly it died: not before it was last seen to live.
    assert own.clock() == pytest.approx(15.0 if how == "dies" else 20.0)
    fresh = SharedGpu(ledger, device, device.clock)  # the next engine has the account of the dead one
    assert fresh.clock() == 0.0
    fresh.begin()
    device.work(2.0, 300.0)
    assert fresh.clock() == pytest.approx(1.0) and own.joules() is not None
