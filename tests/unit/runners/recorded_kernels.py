"""Kernels for a recorded driver: what nvcc made of them, from the record or anew, and what they take."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nightmill.worker.runners.gpu.device import compiler as compilers
from tools.cubins import compile_quickly, read_kernels
from tools.kernel_record import LOCAL, RECORD, Line, digest_of, keep, read_lines

UNASKED_SHARED = 48 << 10
_QUIET = "-diag-suppress=177"


@dataclass
class Kernel:
    """A kernel of a cubin: sizes of its parameters, shared memory that it declares and may ask for.

    parameters  None where nothing was compiled
    loaded      by a launch that was not captured, or because that was asked for
    """

    name: str
    parameters: list[int] | None
    declared: int
    most: int = UNASKED_SHARED
    loaded: bool = False


def compile_recorded(
    text: str, nvcc: str, options: Sequence[str], no_extern_c: bool, arch: str, code: str | None,
    cache_dir: bool, include_dirs: Sequence[str],
) -> bytes:  # fmt: skip
    """As `pycuda.compiler.compile`: what the record has, or a cubin made quickly. Empty without nvcc.

    What the record lacks is noted for whoever writes it next.
    """
    if not nvcc:
        return b""
    assert set(compilers.COMMON_OPTIONS) <= set(options)
    source = Path(text.partition("\n")[0].removeprefix('#line 1 "').removesuffix('"'))
    given = [option for option in options if option not in (*compilers.COMMON_OPTIONS, _QUIET)]
    target = arch if code is None else f"{arch}/{code}"
    version = compilers.compiler_version(nvcc)
    digest = digest_of(source, (*compilers.COMMON_OPTIONS, *given), target, version)
    if (line := recorded_lines().get(digest)) is not None:
        return str(line).encode()
    cubin = compile_quickly(nvcc, source, given, target)
    keep(Line.of_quick(source.stem, target, digest, read_kernels(cubin), given), LOCAL)
    return cubin


@cache
def recorded_lines() -> dict[str, Line]:
    """What nvcc has made, by digest."""
    return read_lines(RECORD, LOCAL)


def kernels_of(cubin: bytes) -> dict[str, Kernel]:
    """The kernels of what `compile_recorded` has given."""
    if cubin.startswith(b"\x7fELF"):
        found = list(read_kernels(cubin).items())
    else:
        line = Line.read(cubin.decode())
        assert line is not None
        found = [(name, kernel) for arch, name, kernel in line.kernels() if arch == line.architecture]
    return {name: Kernel(name, kernel.parameters, kernel.shared) for name, kernel in found}


def nvcc_is_there() -> bool:
    """Where kernels can be compiled."""
    try:
        return bool(compilers.find_nvcc())
    except compilers.CompilerMissingError:  # the answer
        return False
