"""A CUDA runner of options in one row, for tests that vary few of them."""

import os
from dataclasses import fields
from typing import Any

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.chosen import ChosenGpu
from nightmill.worker.runners.gpu.device.known_cards import KnownCard, known_card
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.runner import CudaRunner, Launching

__all__ = ["cuda_runner", "pretended_card"]


def pretended_card() -> KnownCard | None:
    """The card that the GPU is taken for in all tests, by NIGHTMILL_PRETEND_DEVICE; None: itself."""
    return known_card(os.environ.get("NIGHTMILL_PRETEND_DEVICE") or None)


def cuda_runner(file: GgufFile, spec: ModelSpec, **options: Any) -> CudaRunner:
    """The runner; the options are those of RunnerSizes, Launching and CudaRunner itself."""
    sizes, launching = (
        {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        for kind in (RunnerSizes, Launching)
    )
    sizes.setdefault("context", spec.context_length)
    options.setdefault("gpu", ChosenGpu(0, pretended_card()))
    return CudaRunner(file, spec, RunnerSizes(**sizes), launching=Launching(**launching), **options)
