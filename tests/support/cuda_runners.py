"""A CUDA runner of options in one row, for tests that vary few of them."""

import os
from dataclasses import fields
from typing import Any

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.chosen import ChosenGpu
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.known_cards import KnownCard, known_card
from nightmill.worker.runners.gpu.launches import Launching
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.needs import Need, missing

__all__ = ["ON_GPU", "cuda_runner", "need_fp8", "pretended_card"]

# Read once, before a test runs: no variable of Nightmill's reaches a test.
_PRETENDED = known_card(os.environ.get("NIGHTMILL_PRETEND_DEVICE") or None)

ON_GPU: dict[str, Any] = {"gpu": 0} | ({} if _PRETENDED is None else {"pretend_device": _PRETENDED.key})
"""Settings of an engine or a worker on the GPU, which is taken for the card that tests are run as."""


def pretended_card() -> KnownCard | None:
    """The card that the GPU is taken for in all tests, by NIGHTMILL_PRETEND_DEVICE; None: itself."""
    return _PRETENDED


def need_fp8() -> None:
    """Skip the test if its GPU, or what that is taken for, does not multiply FP8."""
    with Device(pretended=_PRETENDED) as device:
        if not device.fp8:
            missing(Need.FP8)


def cuda_runner(file: GgufFile, spec: ModelSpec, **options: Any) -> CudaRunner:
    """The runner; the options are those of RunnerSizes, Launching and CudaRunner itself."""
    sizes, launching = (
        {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        for kind in (RunnerSizes, Launching)
    )
    sizes.setdefault("context", spec.context_length)
    options.setdefault("gpu", ChosenGpu(0, pretended_card()))
    return CudaRunner(file, spec, RunnerSizes(**sizes), launching=Launching(**launching), **options)
