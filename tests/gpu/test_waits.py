"""Waits inside kernels: late warps change nothing, and a lost arrival is an error that names the kernel.

Each launch runs in a process of its own (`tests.gpu.waiting`).
"""

import subprocess
import sys
from pathlib import Path

import pytest

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.waits import BOUNDED_WAITS
from tests.gpu.waiting import LAUNCHES
from tests.support.cuda_runners import pretended_card
from tests.support.needs import Need, missing

ROOT = Path(__file__).parents[2]
SECONDS = 240  # kernels are compiled in it; a launch takes milliseconds
LATE = "-DNIGHTMILL_LATE_TURN=100000"
HEADS = (
    "head:16384x576x1", "head:16384x576x16", "head:16384x896x1", "head:16384x1088x1", "head:16384x1024x16",
    "head:16384x576x32", "head:8448x576x1",
)  # fmt: skip
"""Blocks have three tiles and more of each, but for the last; of the first three, fewer turns than groups."""


@pytest.fixture(autouse=True)
def hopper() -> None:
    with Device(pretended=pretended_card()) as device:
        if not device.hopper:
            missing(Need.HOPPER)


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of a process that launches; killed where that does not end."""
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.waiting", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def digests(*arguments: str) -> list[str]:
    done = launched(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def of_service() -> dict[str, str]:
    """What kernels give that are built as for service, by launch."""
    return {line.split()[0]: line for line in digests(*HEADS, *LAUNCHES)}


@pytest.mark.parametrize("options", [(), (BOUNDED_WAITS,)], ids=["hardware", "bounded"])
def test_a_late_turn_lets_nobody_pass_in_its_place(of_service: dict[str, str], options: tuple[str]) -> None:
    """Where a tile had fewer turns than warpgroups, a third group came to a barrier of two, and all hung."""
    assert digests(*HEADS, LATE, *options) == [of_service[name] for name in HEADS]


@pytest.mark.parametrize("name", LAUNCHES)
def test_warps_that_come_late_at_random_change_no_result(of_service: dict[str, str], name: str) -> None:
    assert digests(name, BOUNDED_WAITS, "-DNIGHTMILL_JITTER") == [of_service[name]]


@pytest.mark.parametrize(
    ("name", "lost", "kernel"),
    [
        ("head:16384x1088x1", "TURNS", "float_3_8_"),
        ("head:16384x1088x1", "COPIES", "float_3_8_"),
        ("tiles", "RELEASES", "float_1_8_"),
        ("few", "COPIES", "product_1_1_1"),
        ("gemm", "RELEASES", "product_"),
        ("halves", "COPIES", "addend_"),
        ("fp8", "RELEASES", "product_"),
        ("prompts", "COPIES", "hopper_attention"),
        ("latents", "COPIES", "hopper_wide"),
        ("latents", "RELEASES", "hopper_wide"),
        ("segments", "COPIES", "split_attention_8"),
    ],
)
def test_a_lost_arrival_ends_in_an_error_that_names_the_kernel(name: str, lost: str, kernel: str) -> None:
    done = launched(name, BOUNDED_WAITS, f"-DNIGHTMILL_LOST_ARRIVAL={lost}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DeviceLostError" in done.stdout
    assert f"the kernel {kernel}" in done.stdout
    assert "waited for an arrival that did not come: block (" in done.stdout
    assert ("named barrier" if lost == "TURNS" else "mbarrier at 0x") in done.stdout
