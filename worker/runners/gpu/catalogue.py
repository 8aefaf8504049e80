"""All that a runner compiles for a model."""

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.few_rows import FewRows
from nightmill.worker.runners.gpu.hopper import HopperQkv, gemm_sources, qkv_source
from nightmill.worker.runners.gpu.kernels import Kernels
from nightmill.worker.runners.gpu.sources import Source, source_of
from nightmill.worker.runners.gpu.split import split_source

__all__ = ["sources_for"]


def sources_for(spec: ModelSpec, *, hopper: bool) -> list[Source]:
    """Files and options for nvcc; those that take longest first."""
    sources: list[Source] = []
    if hopper:
        sources += reversed(gemm_sources())
        if HopperQkv.suits(spec):
            sources.append(qkv_source(spec))
        sources.append(split_source())
        if FewRows.suits(spec):
            sources.append(source_of("few_rows", spec))
    names = [*Kernels.files(spec, hopper=hopper), "dequantize"]
    return [*sources, *(source_of(name, spec) for name in names)]
