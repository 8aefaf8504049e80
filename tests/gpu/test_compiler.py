"""The kernel cache: keyed by all that matters, written in one piece, and clear about what nvcc says."""

import stat
import threading
from pathlib import Path

import pytest

from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.compiler import (
    CompilerMissingError,
    KernelCompileError,
    compile_kernels,
)

SOURCE = '#include "value.cuh"\nextern "C" __global__ void set(int* p) { *p = VALUE + OPTION; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "value.cuh").write_text("#define VALUE 1\n")
    path = tmp_path / "set.cu"
    path.write_text(SOURCE)
    return path


def compiled(source: Path, option: str = "-DOPTION=1", arch: str = "sm_80") -> tuple[bytes, int]:
    """The cubin, and how many compilations it took."""
    reports: list[str] = []
    directory = source.parent / "cache"
    return compile_kernels(source, (option,), arch, directory=directory, report=reports.append), len(reports)


def test_the_second_time_nothing_is_compiled(source: Path) -> None:
    first, compilations = compiled(source)
    assert compilations == 1
    assert compiled(source) == (first, 0)


def test_whatever_the_code_depends_on_makes_a_new_entry(source: Path) -> None:
    compiled(source)
    assert compiled(source, option="-DOPTION=2")[1] == 1
    assert compiled(source, arch="sm_90")[1] == 1
    (source.parent / "value.cuh").write_text("#define VALUE 2\n")
    assert compiled(source)[1] == 1
    source.write_text(SOURCE + "\n")
    assert compiled(source)[1] == 1


def test_workers_that_start_at_once_get_whole_files(source: Path) -> None:
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(compiled(source)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert compiled(source)[0] in results
    assert not list((source.parent / "cache").glob("*.part"))


def test_a_compile_error_shows_the_compilers_lines(source: Path) -> None:
    source.write_text('extern "C" __global__ void broken() { undeclared = 1; }\n')
    with pytest.raises(
        KernelCompileError, match=r"could not compile set\.cu for sm_80.*\n.*set\.cu.*undeclared"
    ):
        compiled(source)


def test_a_missing_include_is_a_compile_error(source: Path) -> None:
    (source.parent / "value.cuh").unlink()
    with pytest.raises(KernelCompileError, match=r"value\.cuh"):
        compiled(source)


def test_without_nvcc_one_message_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name, path=None: None)
    with pytest.raises(CompilerMissingError, match="install the CUDA toolkit"):
        compiled(source)


def test_a_cache_that_cannot_be_written_only_costs_time(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source.parent / "cache").write_text("a file where the directory should be")
    assert compiled(source)[0]
    assert "cannot be written" in caplog.text


def test_cached_files_can_be_read_by_their_owner(source: Path) -> None:
    compiled(source)
    (cubin,) = (source.parent / "cache").iterdir()
    assert cubin.stat().st_mode & stat.S_IRUSR
