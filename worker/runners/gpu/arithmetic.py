"""The name of what a GPU computes with."""

from nightmill.jobs.base.arithmetic import DIGITS, Arithmetic
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device.compiler import compiler_release, kernel_revision
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.elements.library import library_release

__all__ = ["arithmetic_of"]


def arithmetic_of(file: GgufFile, device: Device, precision: Precision) -> Arithmetic:
    """Our kernels and what makes machine code of them, NVIDIA's library, and the kind of GPU."""
    kernels = f"{kernel_revision()[:DIGITS]}, nvcc {compiler_release()}, cuBLASLt {library_release()}"
    return Arithmetic(
        runner="cuda",
        device=device.name,
        weights=precision.weights_name,
        kv=precision.kv_name,
        kernels=kernels,
        model=file.digest()[:DIGITS],
    )
