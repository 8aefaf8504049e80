"""A CUDA runner of options in one row, for tests that vary few of them."""

from dataclasses import fields
from typing import Any

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.runner import CudaRunner, Launching

__all__ = ["cuda_runner"]


def cuda_runner(file: GgufFile, spec: ModelSpec, **options: Any) -> CudaRunner:
    """The runner; the options are those of RunnerSizes, Launching and CudaRunner itself."""
    sizes, launching = (
        {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        for kind in (RunnerSizes, Launching)
    )
    sizes.setdefault("context", spec.context_length)
    return CudaRunner(file, spec, RunnerSizes(**sizes), launching=Launching(**launching), **options)
