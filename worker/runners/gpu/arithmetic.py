"""The name of what a GPU computes with."""

from nightmill.jobs.base.arithmetic import DIGITS, Arithmetic
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device.compiler import compiler_release, kernel_revision
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.elements.library import library_release

__all__ = ["arithmetic_of", "ask_releases"]


def arithmetic_of(file: GgufFile, device: Device, precision: Precision) -> Arithmetic:
    """Our kernels and what makes machine code of them, NVIDIA's library, and the kind of GPU."""
    revision, compiler, library = ask_releases()
    kernels = f"{revision[:DIGITS]}, nvcc {compiler}, cuBLASLt {library}"
    return Arithmetic(
        runner="cuda",
        device=device.name,
        weights=precision.weights_name,
        kv=precision.kv_name,
        kernels=kernels,
        model=file.digest()[:DIGITS],
    )


def ask_releases() -> tuple[str, str, str]:
    """Return the revision of the kernels, and the releases of compiler and library; takes nothing of a GPU.

    The first time it reads all kernels, asks nvcc, and loads the library, which is large. Raises
    CompilerMissingError.
    """
    return kernel_revision(), compiler_release(), library_release()
