"""What needs a GPU is skipped where there is none; runners for modules that say which model (`file`)."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.device import Device, device_count
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.waits import BOUNDED_WAITS
from nightmill.worker.runners.gpu.products import chooser
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.cuda_runners import ON_GPU, cuda_runner, pretended_card
from tests.support.needs import Need, reason

HERE = Path(__file__).parent

BUILDS = {"service": (), "bounded": (BOUNDED_WAITS,), "jitter": (BOUNDED_WAITS, "-DNIGHTMILL_JITTER")}
"""How kernels are built in this process, by NIGHTMILL_TEST_KERNELS: as for service, if it is not there.

bounded  a wait that does not end is an error that names the kernel (`cuda/common/waits.cuh`)
jitter   and warps come late to waits, at random
"""

Make = Callable[..., CudaRunner]


def pytest_report_header() -> list[str]:
    """Say which card tests of a GPU are run as."""
    card = pretended_card()
    return [] if card is None else [f"the GPU is taken for {card.name}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = {path: HERE in path.parents for path in {item.path for item in items}}
    mine = [item for item in items if here[item.path]]
    if mine and not device_count():
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason(Need.GPU)))
    for item in mine:
        item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def kernels() -> Iterator[None]:
    """Built as NIGHTMILL_TEST_KERNELS says; each start times all ways to multiply."""
    options = BUILDS[os.environ.get("NIGHTMILL_TEST_KERNELS", "service")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "COMMON_OPTIONS", (*compiler.COMMON_OPTIONS, *options))
        patch.setattr(chooser, "choices_file", lambda device, beside: None)
        yield


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card that tests are run as is that of the processes that they start, too."""
    if "pretend_device" in ON_GPU:
        monkeypatch.setenv("NIGHTMILL_PRETEND_DEVICE", ON_GPU["pretend_device"])


@pytest.fixture
def element() -> Element:
    """Of the test's device, unless the test says otherwise (`BOTH_ELEMENTS`)."""
    return Element.F16


@pytest.fixture
def kv() -> KvFormat:
    """Of the test's device, unless the test says otherwise."""
    return KvFormat.ELEMENT


@pytest.fixture
def device(element: Element, kv: KvFormat) -> Iterator[Device]:
    """The first GPU, for one test."""
    with Device(0, element, kv, pretended=pretended_card()) as device:
        yield device


@pytest.fixture(scope="module")
def spec(file: GgufFile) -> ModelSpec:
    """Of the module's model."""
    return read_spec(file)


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """What the module's runners are made with, if a test does not say otherwise."""
    return {"max_tokens": 2048, "tune": False}


@pytest.fixture
def make(file: GgufFile, spec: ModelSpec, defaults: dict[str, Any]) -> Iterator[Make]:
    """Makes runners on the module's model that are closed at the end; one at a time."""
    made: list[CudaRunner] = []

    def build(**options: Any) -> CudaRunner:
        for runner in made:
            runner.close()
        made.append(cuda_runner(file, spec, **(defaults | options)))
        return made[-1]

    yield build
    for runner in made:
        runner.close()
