"""Compile every CUDA kernel for the architectures that Nightmill supports; part of `make check`.

Needs nvcc and no GPU. Where nvcc is not installed it says so and succeeds: the kernels are then compiled
by whoever has it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VARIANTS = {  # options that the launchers compile a file with; others are compiled once, with their defaults
    "decode_attention": (("-DHEAD_DIM=64",), ("-DHEAD_DIM=128",)),
    "qkv_rope": (("-DHEAD_DIM=64", "-DINTERLEAVED=0"), ("-DHEAD_DIM=128", "-DINTERLEAVED=1")),
    "prefill_attention": (("-DHEAD_DIM=64",), ("-DHEAD_DIM=128",)),
    "hopper_attention": (("-DHEAD_DIM=64",), ("-DHEAD_DIM=128",)),
    "split_attention": (("-DHEAD_DIM=64",), ("-DHEAD_DIM=128",)),
    "hopper_qkv": (("-DHEAD_DIM=64", "-DINTERLEAVED=0"), ("-DHEAD_DIM=128", "-DINTERLEAVED=1")),
    "few_rows": (("-DHEAD_DIM=64", "-DINTERLEAVED=0"), ("-DHEAD_DIM=128", "-DINTERLEAVED=1")),
}
HOPPER = "sm_90a"
ARCHITECTURES = ("sm_80", HOPPER, "sm_100")
HOPPER_ONLY = ("hopper_", "few_rows")  # how the names of files begin that no other architecture runs
KERNELS = Path(__file__).resolve().parent.parent / "cuda"


def main() -> int:
    """Compile all; 1 where anything failed."""
    sources = sorted(KERNELS.glob("*.cu"))
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print(f"nvcc is not installed: {len(sources)} kernel files not compiled")
        return 0
    jobs = [
        (source, option, architecture)
        for source in sources
        for option in VARIANTS.get(source.stem, ((),))
        for architecture in ((HOPPER,) if source.stem.startswith(HOPPER_ONLY) else ARCHITECTURES)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(pool.map(lambda job: compile_one(nvcc, *job), jobs))
    complaints = [text for text in said if text]
    print("\n".join(complaints), file=sys.stderr, end="\n" if complaints else "")
    print(f"nvcc: {len(jobs)} compilations for {', '.join(ARCHITECTURES)}: {len(complaints)} with complaints")
    return min(len(complaints), 1)


def compile_one(nvcc: str, source: Path, options: tuple[str, ...], architecture: str) -> str:
    """What nvcc said of one kernel, warnings included; empty where it is content."""
    with tempfile.TemporaryDirectory() as directory:
        command = [nvcc, "-cubin", f"-arch={architecture}", "-std=c++17", *options]
        command += ["-o", f"{directory}/kernel.cubin", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and not done.stderr.strip():
        return ""
    return f"{source.name} {' '.join(options)} for {architecture}:\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    raise SystemExit(main())
