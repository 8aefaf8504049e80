"""What `make check` says of the registers that kernels take."""

from pathlib import Path

import pytest

from tests.support.needs import Need, missing
from tools import compile_kernels
from tools.compile_kernels import MOST_STACK, Resources, compile_one, recorded, write_table


def test_a_stack_that_a_kernel_should_not_need_is_a_complaint() -> None:
    assert Resources("mma_gemm", "mma_product", "sm_86", 128, 8).spoilt
    assert not Resources("mma_gemm", "mma_product", "sm_86", 255, 0).spoilt
    most = MOST_STACK["split_attention"]
    assert not Resources("split_attention", "split_attention_16", "sm_80", 255, most).spoilt
    assert Resources("split_attention", "split_attention_16", "sm_80", 255, most + 8).spoilt
    assert not Resources("dequantize", "dequantize_Q4_K", "sm_80", 32, 40).spoilt, "not in a step"


def test_the_table_has_the_largest_stacks_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_kernels, "ROOT", tmp_path)
    used = [Resources("a", "k", "sm_80", 10, 0), Resources("b", "l", "sm_86", 20, 48)]
    said = write_table(used)
    assert said.startswith("1 of 2 kernels need a stack, the largest in bytes: b l for sm_86 48.")
    table = (tmp_path / "build" / "kernels" / "registers.txt").read_text()
    assert table.splitlines() == [
        "b l for sm_86: 20 registers, 48 bytes of stack", "a k for sm_80: 10 registers, 0 bytes of stack",
    ]  # fmt: skip


@pytest.mark.heavy
def test_registers_are_read_for_each_gpu_that_takes_the_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = compile_kernels.shutil.which("nvcc")
    if nvcc is None:
        missing(Need.NVCC)
    monkeypatch.setattr(compile_kernels, "DONE", tmp_path)
    source = tmp_path / "two.cu"
    source.write_text(
        'extern "C" __global__ void plain(float* x) { x[threadIdx.x] *= 2.0f; }\n'
        'extern "C" __global__ void stacked(float* x, const int* at) {\n'
        "    float held[64];\n"
        "    for (int i = 0; i < 64; ++i) held[at[i] & 63] = x[i];\n"
        "    x[0] = held[at[0] & 63] + held[at[1] & 63];\n}\n"
    )
    job = source, (), "sm_80"
    assert compile_one(nvcc, "one", *job) == ""
    found = {(one.kernel, one.architecture): one for one in recorded(job, "one")}
    assert {on for _, on in found} == {"sm_80", "sm_86", "sm_120"}
    for on in ("sm_80", "sm_86", "sm_120"):
        assert found["plain", on].stack == 0 < found["plain", on].registers
        assert found["stacked", on].stack >= 256
    source.write_text('extern "C" __global__ void wrong(float* x) { y = 1; }\n')
    said = compile_one(nvcc, "two", *job)
    assert said.startswith("two.cu ") and 'identifier "y" is undefined' in said
    assert not list(recorded(job, "two"))
