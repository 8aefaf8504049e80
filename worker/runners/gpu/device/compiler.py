"""Compiles the kernels in `cuda/` with PyCUDA and keeps the cubins on disk, so that a second start is quick.

PyCUDA has a cache of its own, but writes it in place and runs the preprocessor at every start. Ours is keyed
by everything that the machine code depends on, and a file appears in it by renaming: several workers may
start at once, and one that dies while it compiles leaves nothing behind that another would load.
"""

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from nightmill import package_directory
from nightmill.jobs.errors import RunnerError

__all__ = [
    "CompilerMissingError",
    "KernelCompileError",
    "compile_all",
    "compile_kernels",
    "included_files",
    "kernel_directory",
    "kernel_revision",
]

log = logging.getLogger(__name__)

Report = Callable[[str], None]
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_COMMENT = re.compile(rb"""//[^\n]*|/\*.*?\*/|(?P<literal>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])+')""", re.DOTALL)
_FORMAT = b"1"  # change it to make every cached cubin stale
COMMON_OPTIONS = ("-O3", "-std=c++17", "-lineinfo")
_SHOWN_LINES = 40


class CompilerMissingError(RunnerError):
    """nvcc, the compiler of the CUDA toolkit, was not found."""


class KernelCompileError(RunnerError):
    """nvcc refused a kernel."""


@cache
def kernel_directory() -> Path:
    """Return the folder of the kernel files."""
    return (package_directory() / "_cuda").resolve()


@cache
def kernel_revision() -> str:
    """Return a digest of the code of all kernels (64 hexadecimal digits).

    Comments, spacing and folders do not count: texts depend on what is computed, not on how it is explained.
    Nor do the readable kernels (`*_reference.cu`), which compute no text.
    """
    seen = hashlib.sha256()
    for path in sorted(kernel_directory().rglob("*.cu*"), key=lambda path: path.name):
        if path.stem.endswith("_reference"):
            continue
        seen.update(path.name.encode() + b"\x00" + _code(path.read_bytes()) + b"\x00")
    return seen.hexdigest()


def _code(text: bytes) -> bytes:
    """The text of a kernel file without comments, with single spaces, and includes without their folders."""
    code = _COMMENT.sub(lambda found: found["literal"] or b" ", text)
    code = _INCLUDE.sub(lambda found: b"#include " + found[1].rpartition(b"/")[2], code)
    return b" ".join(code.split())


def find_nvcc() -> str:
    """The path of nvcc, from PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda; raises CompilerMissingError."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for place in (None, *(str(Path(root, "bin")) for root in roots if root)):
        if (found := shutil.which("nvcc", path=place)) is not None:
            return found
    raise CompilerMissingError(
        "nvcc was not found on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin: install the CUDA toolkit "
        "(12 or newer) or set CUDA_HOME; `--reference` generates without a GPU"
    )


@cache
def compiler_version(nvcc: str) -> str:
    """Return what `nvcc --version` prints; raises CompilerMissingError if it does not run."""
    try:
        return subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerMissingError(f"{nvcc} does not run: {error}") from error


def compiler_release() -> str:
    """nvcc's version, as 13.0.88; raises CompilerMissingError."""
    found = re.search(r"\bV(\d[\d.]*)", compiler_version(find_nvcc()))
    return found[1] if found else "unknown"


def cache_directory() -> Path:
    """The user's directory for cubins. Raises RunnerError where the user has no home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "nightmill", "cubins")
    try:
        return Path.home() / ".cache" / "nightmill" / "cubins"
    except RuntimeError as error:  # a container's user without a name
        raise RunnerError(
            f"user {os.getuid()} has no home directory for compiled kernels: set HOME or XDG_CACHE_HOME to a "
            "folder that it can write to"
        ) from error


def compile_kernels(
    source: Path,
    options: Sequence[str] = (),
    arch: str = "sm_80",
    *,
    directory: Path | None = None,
    report: Report = log.info,
) -> bytes:
    """Return the cubin of one .cu file, from the cache or from nvcc.

    options    for nvcc, e.g. ("-DHEAD_DIM=64",)
    arch       e.g. "sm_90a"; `Device.architecture` of the device that is to run it. "compute_86/sm_90": code
               for the first made into machine code for the second
    directory  of the cache, by default the user's
    report     told about each compilation and how long it took

    Raises CompilerMissingError, or KernelCompileError with the compiler's lines.
    """
    nvcc = find_nvcc()
    options = (*COMMON_OPTIONS, *options)
    directory = directory or cache_directory()
    cached = directory / cubin_name(source, options, arch, compiler_version(nvcc))
    try:
        return cached.read_bytes()
    except OSError:
        pass  # not compiled yet, or a cache that cannot be read: compile
    began = time.monotonic()
    cubin = _run_compiler(source, options, arch, nvcc)
    report(f"compiled {source.name} for {arch} in {time.monotonic() - began:.1f} s")
    _store(cached, cubin)
    return cubin


def compile_all(
    sources: Iterable[tuple[Path, Sequence[str]]], arch: str, *, report: Report = log.info
) -> list[bytes]:
    """Compile several (source, options) at once, as many as there are processors; cubins in their order."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(lambda job: compile_kernels(job[0], job[1], arch, report=report), sources))


def cubin_name(source: Path, options: Sequence[str], arch: str, version: str) -> str:
    """A file's name with a digest of all that its machine code depends on; `version`: of nvcc."""
    digest = hashlib.sha256()
    parts = [_FORMAT, arch.encode(), version.encode(), *(option.encode() for option in options)]
    for part in (*parts, *included_files(source).values()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{source.stem}-{digest.hexdigest()[:32]}.cubin"


def included_files(source: Path) -> dict[Path, bytes]:
    """The texts of a file and of all that it includes with quotes, in a fixed order; see `_included`.

    Raises KernelCompileError where one cannot be read.
    """
    texts: dict[Path, bytes] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path in texts:
            continue
        try:
            texts[path] = path.read_bytes()
        except OSError as error:
            raise KernelCompileError(f"{path}: cannot be read: {error.strerror or error}") from error
        waiting += [_included(name.decode(), path.parent) for name in _INCLUDE.findall(texts[path])]
    return texts


def _included(name: str, folder: Path) -> Path:
    """The file that nvcc takes: in the folder of the one that includes it, or else in `cuda/`.

    `folder` is resolved. Symbolic links are not followed anew for each line: that took most of the time.
    """
    beside = Path(os.path.normpath(folder / name))
    return beside if beside.is_file() else Path(os.path.normpath(kernel_directory() / name))


def _run_compiler(source: Path, options: Sequence[str], arch: str, nvcc: str) -> bytes:
    from pycuda.compiler import compile as pycuda_compile
    from pycuda.driver import CompileError

    virtual, _, real = arch.partition("/")
    text = f'#line 1 "{source}"\n{source.read_text(encoding="utf-8")}'
    try:
        cubin: bytes = pycuda_compile(
            text,
            nvcc=nvcc,
            options=[*options, "-diag-suppress=177"],
            no_extern_c=True,
            arch=virtual,
            code=real or None,
            cache_dir=False,
            include_dirs=[str(source.parent), str(kernel_directory())],
        )
    except CompileError as error:
        lines = [line for line in (error.stderr or str(error)).splitlines() if line.strip()]
        shown = "\n".join(lines[:_SHOWN_LINES])
        raise KernelCompileError(
            f"nvcc could not compile {source.name} for {arch} ({nvcc}); it says:\n{shown}"
        ) from error
    return cubin


def _store(path: Path, cubin: bytes) -> None:
    """Put a file into the cache in one step; a cache that cannot be written only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(cubin)
                file.flush()
                os.fsync(handle)  # else it may be empty after a power failure, and fail at each start
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the kernel cache %s cannot be written: %s", path.parent, error)
