"""What `make check` says of kernels, of which a record has what nvcc made."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from nightmill.worker.runners.gpu.device.compiler import COMMON_OPTIONS, included_files, kernel_directory
from tests.support.needs import Need, missing
from tools import compile_kernels, kernel_record
from tools.compile_kernels import MOST_STACK, Resources, look_up, of_tests, resources, write_table
from tools.cubins import Kernel
from tools.kernel_record import Line, code_of, digest_of, read_lines, write_lines
from tools.kernel_sources import Job

KERNELS = {
    "sm_80": {"large": Kernel(128, 40, 1024, [8, 4]), "none": Kernel(16)},
    "sm_86": {"large": Kernel(96, 0, 1024, [8, 4]), "none": Kernel(16)},
}


def test_a_stack_that_a_kernel_should_not_need_is_a_complaint() -> None:
    assert Resources("mma_gemm", "mma_product", "sm_86", 128, 8).spoilt
    assert not Resources("mma_gemm", "mma_product", "sm_86", 255, 0).spoilt
    most = MOST_STACK["residual residual_4"]
    assert not Resources("residual", "residual_4", "sm_120", 64, most).spoilt
    assert Resources("residual", "residual_4", "sm_120", 64, most + 8).spoilt
    assert Resources("residual", "residual_2", "sm_120", 64, most).spoilt, "the grant is one kernel's"
    assert not Resources("dequantize", "dequantize_Q4_K", "sm_80", 32, 16).spoilt, "not in a step"
    assert Resources("new", "of_a_new_file", "sm_80", 255, 8).spoilt, "a file that nobody granted anything"


def test_what_the_record_has_needs_no_stack_that_it_was_not_granted() -> None:
    lines = [line for line in read_lines(kernel_record.RECORD).values() if not line.quick]
    used = set(resources(lines))
    assert len(used) > 1000
    assert not sorted(str(one) for one in used if one.spoilt)
    stacked = {f"{one.file} {one.kernel}" for one in used if one.stack}
    idle = [key for key in MOST_STACK if not any(name.startswith(key) for name in stacked)]
    assert idle == [], "granted, and needed by no kernel any more"


def test_the_table_has_the_largest_stacks_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_kernels, "ROOT", tmp_path)
    used = [Resources("a", "k", "sm_80", 10, 0), Resources("b", "l", "sm_86", 20, 48)]
    said = write_table(used)
    assert said.startswith("1 of 2 kernels need a stack, the largest in bytes: b l for sm_86 48.")
    table = (tmp_path / "build" / "kernels" / "registers.txt").read_text()
    assert table.splitlines() == [
        "b l for sm_86: 20 registers, 48 bytes of stack", "a k for sm_80: 10 registers, 0 bytes of stack",
    ]  # fmt: skip


# -- the record ----------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The options of what was compiled: nothing is, and what is kept here stays in this test."""
    seen: list[tuple[str, ...]] = []

    def compile_one(nvcc: str, digest: str, *job: object) -> tuple[str, Line | None]:
        source, options, architecture = job
        assert isinstance(source, Path) and isinstance(options, tuple)
        seen.append(options)
        if "error" in source.read_text():
            return "it is wrong", None
        found = [(str(architecture), KERNELS["sm_80"]), ("sm_86", KERNELS["sm_86"])]
        return "", Line.of(source.stem, digest, found)

    monkeypatch.setattr(compile_kernels, "compile_one", compile_one)
    monkeypatch.setattr(compile_kernels, "LOCAL", tmp_path / "local.txt")
    return seen


def test_a_line_says_what_was_compiled_and_another_is_no_line() -> None:
    line = Line.of("mma_gemm", "0123", [*KERNELS.items()])
    assert Line.read(str(line)) == line and not line.quick
    found = {(on, name): kernel for on, name, kernel in line.kernels()}
    assert found["sm_80", "large"] == KERNELS["sm_80"]["large"]
    assert (found["sm_86", "large"].registers, found["sm_86", "large"].stack) == (96, 0)
    assert {str(one) for one in resources([line]) if one.spoilt} == {"mma_gemm large for sm_80"}
    for wrong in (
        str(line).replace(":40:", ":0:"), str(line).replace("0123", "0124"), str(line)[:-1],
        str(line).replace("sm_86", "sm_89"), "<<<<<<< HEAD", "",
    ):  # fmt: skip
        assert Line.read(wrong) is None, wrong
    quick = Line.of_quick("a", "sm_80", "01", KERNELS["sm_80"], ["-DHEAD_DIM=80", "-DTYPES=int a; int b"])
    assert Line.read(str(quick)) == quick and quick.quick
    assert json.loads(quick.options) == ["-DHEAD_DIM=80", "-DTYPES=int a; int b"]
    assert [kernel.parameters for _, name, kernel in quick.kernels() if name == "large"] == [[8, 4]]


def test_what_the_record_has_is_not_compiled_and_judged_like_what_is(
    compiled: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """By changes of a header, of an option, of nvcc, and by a line that is missing."""
    header, source, record = tmp_path / "a.cuh", tmp_path / "mma_gemm.cu", tmp_path / "record.txt"
    header.write_text("#define SIZE 1\n")
    source.write_text('#include "a.cuh"\nint size = SIZE;\n')

    def look(options: Sequence[tuple[str, ...]], version: str = "13.0") -> list[tuple[str, ...]]:
        compiled.clear()
        jobs: list[Job] = [(source, one, "sm_80") for one in options]
        lines, complaints, number = look_up(jobs, "nvcc", version, read_lines(record))
        assert number == len(compiled) and not complaints and len(lines) == len(jobs)
        assert any(one.spoilt for one in resources(lines)), "judged, wherever it is from"
        assert {one.registers for one in resources(lines)} == {128, 96, 16}
        write_lines(record, {*lines, *read_lines(record).values()})
        return list(compiled)

    both = [("-DA=1",), ("-DA=2",)]
    assert sorted(look(both)) == both
    assert look(both) == []
    assert look([*both, ("-DA=3",)]) == [("-DA=3",)], "an option"
    assert look([("-DA=", "1")]) == [("-DA=", "1")], "where options end is a difference, too"
    header.write_text("// said otherwise\n#define  SIZE 1   /* one */\n\n")
    assert look(both) == []
    header.write_text("#define SIZE 2\n")
    assert sorted(look(both)) == both, "a header"
    assert sorted(look(both, "13.1")) == both, "nvcc"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(lines[::-1] + lines[:2]))
    assert look(both) == [], "in any order, twice"
    missing = digest_of(source, (*COMMON_OPTIONS, "-DA=2"), "sm_80", "13.0")
    record.write_text("".join(line for line in lines if missing not in line))
    assert look(both) == [("-DA=2",)], "a line that is missing"
    record.unlink()
    assert sorted(look(both)) == both, "no record"


def test_a_line_is_written_once_and_what_is_stale_goes(
    compiled: list[tuple[str, ...]], tmp_path: Path
) -> None:
    source, record = tmp_path / "a.cu", tmp_path / "record.txt"
    source.write_text("int a;\n")
    lines, _, _ = look_up([(source, (), "sm_80")], "nvcc", "13", {})
    assert write_lines(record, lines)
    assert not write_lines(record, read_lines(record).values())
    assert read_lines(tmp_path / "local.txt") == read_lines(record), "kept for whoever writes the record"
    source.write_text("error\n")
    assert look_up([(source, (), "sm_80")], "nvcc", "13", read_lines(record)) == ([], ["it is wrong"], 1)


def test_everything_is_compiled_if_asked_and_false_figures_are_found(
    compiled: list[tuple[str, ...]], tmp_path: Path
) -> None:
    source = tmp_path / "a.cu"
    source.write_text("int a;\n")
    digest = digest_of(source, COMMON_OPTIONS, "sm_80", "13")
    false = Line.of("a", digest, [("sm_80", {"large": Kernel(1, 0)})])
    assert look_up([(source, (), "sm_80")], "nvcc", "13", {digest: false}) == ([false], [], 0)
    (line,), (said,), number = look_up([(source, (), "sm_80")], "nvcc", "13", {digest: false}, anew=True)
    assert number == 1 and line != false and "a.cu for sm_80: the record has\na sm_80" in said
    assert look_up([(source, (), "sm_80")], "nvcc", "13", {digest: line}, anew=True) == ([line], [], 1)


def test_the_digest_covers_all_that_nvcc_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "a.cu"
    source.write_text("int a;\n")

    def digest(options: Sequence[str] = (), architecture: str = "sm_80", version: str = "13") -> str:
        return digest_of(source, options, architecture, version)

    seen = [
        digest(),
        digest(["-DA"]),
        digest(["-DA", "-DB"]),
        digest(architecture="sm_90a"),
        digest(version="12"),
    ]
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-maxrregcount=32")
    seen.append(digest())
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    monkeypatch.setattr(kernel_record, "ALSO", {"sm_80": ("sm_86",)})
    seen.append(digest())
    source.rename(source := tmp_path / "b.cu")
    seen.append(digest())
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"#define A 1 \\\n\nint x;\n", b"#define A 1 \\\nint x;\n"),  # an empty line ends a macro
        (b"// so \\\nint x;\n", b"// so\nint x;\n"),  # a comment goes on in the next line
        (b'asm("// one");\n', b'asm("// two");\n'),
        (b'asm("a  b");\n', b'asm("a b");\n'),
        (b"int a = 1'0; // 'x\n", b"int a = 1'0; // 'y\n"),
        (b'char* a = R"(// a)";\n', b'char* a = R"(// b)";\n'),
        (b"int a = __LINE__;\n", b"\nint a = __LINE__;\n"),
        (b"#define A 1\nint x;\n", b"#define A 1 int x;\n"),
    ],
)
def test_what_may_be_code_is_never_taken_for_a_comment(one: bytes, other: bytes) -> None:
    assert code_of(one) != code_of(other)


def test_comments_and_spacing_are_no_code() -> None:
    assert code_of(b"// a\nint  x; // b \n\n/* c\n d */\tint y;\n") == code_of(b"int x;\nint y;")


def test_kernel_files_name_what_they_include_so_that_the_record_sees_it() -> None:
    ours = {path.name for path in kernel_directory().rglob("*.cu*")}
    for path in kernel_directory().rglob("*.cu*"):
        for line in path.read_text().splitlines():
            words = line.replace("#", "# ").split()
            if words[:2] == ["#", "include"]:
                assert words[2].startswith('"') or Path(words[2].strip("<>")).name not in ours, (path, line)
                assert words[2][0] in '"<', (path, line)
        assert len(included_files(path)) >= 1


@pytest.mark.heavy
def test_nvcc_is_asked_for_what_is_new_and_tests_lines_are_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Registers of each GPU that takes the code; what nvcc complains of; quickly, what tests ask for."""
    nvcc = compile_kernels.shutil.which("nvcc")
    if nvcc is None:
        missing(Need.NVCC)
    monkeypatch.setattr(compile_kernels, "LOCAL", tmp_path / "local.txt")
    monkeypatch.setattr(compile_kernels, "kernel_directory", lambda: tmp_path)
    source = tmp_path / "two.cu"
    source.write_text(
        'extern "C" __global__ void plain(float* x, int) { x[threadIdx.x] *= 2.0f; }\n'
        'extern "C" __global__ void stacked(float* x, const int* at) {\n'
        "    __shared__ float all[32];\n"
        "    float held[64];\n"
        "    for (int i = 0; i < 64; ++i) held[at[i] & 63] = x[i];\n"
        "    all[threadIdx.x] = held[at[0] & 63] + held[at[1] & 63];\n"
        "    x[0] = all[at[2]];\n}\n"
    )
    (line,), complaints, _ = look_up([(source, (), "sm_80")], nvcc, "one", {})
    assert complaints == []
    found = {(name, on): kernel for on, name, kernel in line.kernels()}
    assert {on for _, on in found} == {"sm_80", "sm_86", "sm_120"}
    for on in ("sm_80", "sm_86", "sm_120"):
        assert found["plain", on].stack == 0 < found["plain", on].registers
        assert found["stacked", on].stack >= 256
    assert found["plain", "sm_80"].parameters == [8, 4] and found["plain", "sm_80"].shared == 0
    assert found["stacked", "sm_80"].shared == 128
    stale = Line.of_quick("two", "sm_80", "00", {}, ["-DA"])
    gone = Line.of_quick("gone", "sm_80", "00", {}, ["-DA"])
    (quick,) = of_tests([stale, gone, line], nvcc, "one")
    assert quick.options == '["-DA"]' and list(of_tests([quick, stale], nvcc, "one")) == [quick]
    assert {name: kernel.parameters for _, name, kernel in quick.kernels()} == {
        "plain": [8, 4],
        "stacked": [8, 8],
    }
    source.write_text('extern "C" __global__ void wrong(float* x) { y = 1; }\n')
    lines, (said,), _ = look_up([(source, (), "sm_80")], nvcc, "one", {line.digest: line})
    assert lines == [] and said.startswith("two.cu ") and 'identifier "y" is undefined' in said
    assert list(of_tests([quick], nvcc, "one")) == [], "tests no longer ask for it"
