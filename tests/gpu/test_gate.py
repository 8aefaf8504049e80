"""What is queued behind a closed gate runs when it opens, and not before."""

import time

import numpy as np
import pytest

from worker.runners.gpu.device import Device
from worker.runners.gpu.gate import Gate


def test_work_waits_for_the_gate_and_runs_when_it_opens(device: Device) -> None:
    gate, done = Gate(device), device.event()
    target = device.upload(np.zeros(1024, dtype=np.uint8))
    for value in (1, 2):  # it closes again
        with gate:
            device.fill(target, value, 1024)
            done.record(device.stream)
            time.sleep(0.05)
            assert not done.query()
        assert (device.download(target, 1024, np.uint8) == value).all()


def test_an_error_in_its_body_opens_it(device: Device) -> None:
    with pytest.raises(ValueError, match="queued"), Gate(device):
        raise ValueError("nothing queued")
    device.synchronize()
