"""What needs a GPU is skipped where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nightmill.worker.runners.gpu.device.device import Device, device_count

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if mine and not device_count():
        for item in mine:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU that PyCUDA can use"))
    for item in mine:
        item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> Iterator[Device]:
    """The first GPU, for one test."""
    with Device(0) as device:
        yield device
