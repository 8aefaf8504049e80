"""The files in `cuda/`: each has one name, and a cubin's name hangs on all that its source includes."""

import errno
import os
import pwd
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from nightmill.jobs.errors import RunnerError
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.compiler import (
    KernelCompileError,
    cubin_name,
    kernel_directory,
    kernel_revision,
)
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.sources import for_element, source_of


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `cuda/` that kernels are taken from."""
    copy = tmp_path / "cuda"
    shutil.copytree(kernel_directory(), copy)
    monkeypatch.setattr(compiler, "kernel_directory", lambda: copy)
    return copy


def cubins(kernels: Path) -> dict[str, str]:
    return {path.stem: cubin_name(path, (), "sm_90a", "13.0") for path in kernels.rglob("*.cu")}


def test_a_kernel_file_is_found_in_its_folder_by_its_name() -> None:
    names = Counter(path.stem for path in kernel_directory().rglob("*.cu"))
    assert set(names.values()) == {1}
    for name in names:
        path, options = source_of(name)
        assert (path.is_file(), kernel_directory() in path.parents, options) == (True, True, ())


def test_a_changed_header_is_compiled_again_in_every_file_that_reaches_it(kernels: Path) -> None:
    before = cubins(kernels)
    header = kernels / "common" / "kv_cache.cuh"
    header.write_text(header.read_text() + "// changed\n")
    after = cubins(kernels)
    changed = {name for name, cubin in after.items() if cubin != before[name]}
    assert changed == {
        "attention_any", "decode_attention", "prefill_attention", "split_attention", "wide_attention",
        "widen_pages",
        "few_rows", "hopper_qkv", "latent_rows", "packed_qkv", "qkv_rope",
    }  # fmt: skip


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a container's user that has a number and no name."""

    def unknown(user: int) -> None:
        raise KeyError(f"uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.cache_directory() == tmp_path / ".cache" / "nightmill" / "cubins"
    monkeypatch.delenv("HOME")
    with pytest.raises(RunnerError, match=rf"user {os.getuid()} has no home .*: set HOME or XDG_CACHE_HOME"):
        compiler.cache_directory()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert compiler.cache_directory() == Path("/cache/nightmill/cubins")


def test_a_kernel_is_on_the_disk_before_it_has_its_name_and_a_full_disk_keeps_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(compiler, "compiler_version", lambda nvcc: "13.0")
    monkeypatch.setattr(compiler, "_run_compiler", lambda *arguments: b"code")
    there: list[list[str]] = []

    def synced(handle: int, full: bool) -> None:
        there.append([path.suffix for path in tmp_path.iterdir()])
        assert os.fstat(handle).st_size == 4
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    path, options = source_of("digest")
    for full, kept in ((True, []), (False, [b"code"])):
        monkeypatch.setattr(os, "fsync", partial(synced, full=full))
        assert compiler.compile_kernels(path, options, directory=tmp_path) == b"code"
        assert [one.read_bytes() for one in tmp_path.iterdir()] == kept
    assert there == [[".part"]] * 2


def test_only_files_that_know_elements_are_compiled_for_each_of_them() -> None:
    """What works on logits is the same for all, and compiled once."""
    names = sorted(path.stem for path in kernel_directory().rglob("*.cu"))
    half, brain = ([for_element(source_of(name), element) for name in names] for element in Element)
    assert all(options == () for _, options in half)
    assert {path.stem for path, options in brain if options == ()} == {
        "adjust", "apply_masks", "copy_states", "log_probabilities", "logits", "route", "sample",
        "sample_filtered", "sample_reference", "slots",
    }  # fmt: skip
    assert {options for _, options in brain} == {(), ("-DELEMENT_BF16",)}


def test_a_missing_header_is_named(kernels: Path) -> None:
    (kernels / "common" / "hopper.cuh").unlink()
    with pytest.raises(KernelCompileError, match=r"common/hopper\.cuh: cannot be read"):
        cubins(kernels)


def test_the_revision_is_of_code_not_of_comments_and_folders(kernels: Path) -> None:
    revision = kernel_revision.__wrapped__
    before = revision()
    source = kernels / "products" / "packed" / "packed_few.cu"
    text = source.read_text()
    source.unlink()
    moved = kernels / "packed_few.cu"
    moved.write_text("// Explained otherwise.\n\n" + text.replace('"products/packed/', '"packed/'))
    assert revision() == before
    readable = kernels / "products" / "elements" / "product_reference.cu"
    readable.write_text(readable.read_text() + "\n__device__ int more;\n")
    assert revision() == before, "it computes no text"
    moved.write_text(text + "\n__device__ int more;\n")
    assert revision() != before


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("int a; // one", "int a; // other", True),
        ("int a; /* one\n two */ int b;", "int a;\n\n  int b;", True),
        ('printf("// %d");', 'printf("// %u");', False),
        ('#include "common/a.cuh"\n', '#include "other/a.cuh"\n', True),
        ('#include "common/a.cuh"\n', '#include "common/b.cuh"\n', False),
        ("int a = 1;", "int a = 2;", False),
        ("char a = '\"'; // one", "char a = '\"'; // other", True),
    ],
)
def test_what_counts_as_code(one: str, other: str, same: bool) -> None:
    assert (compiler._code(one.encode()) == compiler._code(other.encode())) == same
