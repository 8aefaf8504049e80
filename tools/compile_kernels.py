"""Compile every CUDA kernel for the architectures that Nightmill supports; part of `make check`.

Needs nvcc and no GPU. Where nvcc is not installed it says so and succeeds: the kernels are then compiled
by whoever has it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
KERNELS = Path(__file__).resolve().parent.parent / "cuda"


def main() -> int:
    """Compile all; the exit code counts the failures."""
    sources = sorted(KERNELS.glob("**/*.cu"))
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print(f"nvcc is not installed: {len(sources)} kernel files not compiled")
        return 0
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        for source in sources:
            for architecture in ARCHITECTURES:
                target = Path(directory) / f"{source.stem}.{architecture}.cubin"
                command = [
                    nvcc,
                    "-cubin",
                    f"-arch={architecture}",
                    "-std=c++17",
                    "-o",
                    str(target),
                    str(source),
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    failures += 1
                    print(f"{source.name} for {architecture}:\n{done.stderr}", file=sys.stderr)
    print(f"nvcc: {len(sources)} kernel files for {', '.join(ARCHITECTURES)}: {failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    raise SystemExit(main())
