"""Compile every CUDA kernel as the launchers do, for the architectures supported.

    python -m tools.compile_kernels [--all] [--write]

Needs nvcc and no GPU. Where nvcc is not installed it says so and succeeds: the kernels are then compiled
by whoever has it. `tools/compiled_kernels.txt` has what nvcc made of each file (`tools.kernel_record`), and
only what that lacks is compiled: what is new, or whose code, options or nvcc have changed. `make check`
compiles that; `make kernels` (`--write`) also renews the record; `make kernels ALL=1` (`--all`) compiles
everything, and complains where the record says something else.

Code for compute capability 8.0 is also made into instructions of the GPUs that take it with the same sources
(RTX 30, RTX 50), which costs a sixth of compiling it each; what is other for 8.9, or for one of those, is
compiled for that. Registers and stack of each kernel are written into build/kernels/registers.txt; one that
needs a stack, or a larger one than `MOST_STACK` grants it, is a complaint, whether it was compiled now or is
in the record.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from nightmill.worker.runners.gpu.device.compiler import COMMON_OPTIONS, kernel_directory
from tools.cubins import CompilationError, compile_quickly, read_kernels
from tools.kernel_record import ALSO, LOCAL, RECORD, ROOT, Line, digest_of, keep, read_lines, write_lines
from tools.kernel_sources import ARCHITECTURES, Job, every_source

MOST_STACK = {
    # once, while a model is loaded: tables that are indexed, angles of any size
    "dequantize": 16, "repack": 16, "qkv_rope rope_table": 40,
    # for sizes of heads that no fast kernel takes, for one type of embeddings, and for tests alone
    "attention_any": 24, "layer_inputs": 8, "sample_reference": 48,
    # outside of loops, or once for a head's state of 64 KiB; rows of more than 4,096 numbers on an RTX 50
    "few_rows": 16, "rms_norm": 8, "unpack": 8, "delta_recurrent": 32, "residual residual_4": 16,
    "combine combine_2": 8, "split_attention split_attention_16": 8,
    # of heads of 256 before Hopper, most of it before the loop (benchmarks/TRIED.md)
    "prefill_attention": 48,
    # states of sizes that no model has which runs by these: on Hopper 128 x 128 goes by the files below
    "delta_chunked": 56, "mamba_chunked": 152,
    # on Hopper, where benchmarks/RESULTS.md has their speed; of tiles those that are no faster are not chosen
    "decode_attention": 8, "delta_hopper": 856, "mamba_hopper": 400, "hopper_attention": 168,
    "hopper_gemm": 32, "hopper_qkv": 112, "packed_gemm": 128, "hopper_grouped": 64,
}  # fmt: skip
"""Bytes of stack that kernels may need, by file, or by file and kernel: all others none."""
_SHOWN = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what the record lacks; 1 where anything failed, or where no launcher compiles a file."""
    parser = argparse.ArgumentParser(prog="python -m tools.compile_kernels", description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile what the record has, too")
    parser.add_argument("--write", action="store_true", help="renew the record")
    chosen = parser.parse_args(arguments)
    files = sorted(kernel_directory().rglob("*.cu"))
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print(f"nvcc is not installed: {len(files)} kernel files not compiled")
        return 0
    jobs = sorted(set(every_source()), key=str)
    forgotten = sorted({path.name for path in files} - {path.name for path, _, _ in jobs})
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    known = read_lines(RECORD, LOCAL)
    lines, complaints, compiled = look_up(jobs, nvcc, version, known, anew=chosen.all)
    complaints += [f"{name}: no launcher compiles it" for name in forgotten]
    used = set(resources(lines))
    complaints += [f"{one}: {one.stack} bytes of stack" for one in sorted(used, key=str) if one.spoilt]
    print("\n".join(complaints), file=sys.stderr, end="\n" if complaints else "")
    taken = f"{len(jobs) - compiled} are in the record, {compiled} were compiled"
    made_for = ", ".join(ARCHITECTURES)
    print(f"nvcc: {len(jobs)} compilations for {made_for}: {taken}, {len(complaints)} with complaints")
    print(f"registers: {write_table(used)}")
    if chosen.write and len(lines) == len(jobs):
        mine = {line.digest for line in lines}
        quick = [line for line in of_tests(known.values(), nvcc, version) if line.digest not in mine]
        written = write_lines(RECORD, {*lines, *quick})
        print(f"{RECORD.relative_to(ROOT)}: {'written; commit it' if written else 'nothing is new'}")
    elif not set(lines) <= set(read_lines(RECORD).values()):
        print(f"{RECORD.relative_to(ROOT)} lacks some: `make kernels` renews it")
    return min(len(complaints), 1)


def look_up(
    jobs: Sequence[Job], nvcc: str, version: str, known: dict[str, Line], *, anew: bool = False
) -> tuple[list[Line], list[str], int]:
    """The line of each job, from those known or by compiling; complaints; how many were compiled.

    anew  compile what is known, too, and complain where something else comes out
    """

    def look(job: Job) -> tuple[Line | None, str, bool]:
        source, options, architecture = job
        digest = digest_of(source, (*COMMON_OPTIONS, *options), architecture, version)
        found = known.get(digest)
        if found is not None and found.quick:
            found = None
        if found is not None and not anew:
            return found, "", False
        said, line = compile_one(nvcc, digest, *job)
        if line is not None and found is None:
            keep(line, LOCAL)  # for the next call, and for whoever writes the record
        if line is not None and found not in (None, line):
            said = f"{source.name} for {architecture}: the record has\n{found}\nand nvcc made\n{line}"
        return line, said, True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        looked = list(pool.map(look, jobs))
    lines = [line for line, _, _ in looked if line is not None]
    return lines, [said for _, said, _ in looked if said], sum(compiled for *_, compiled in looked)


def compile_one(
    nvcc: str, digest: str, source: Path, options: tuple[str, ...], architecture: str
) -> tuple[str, Line | None]:
    """What nvcc said of one file, warnings included, or else the line of what it made."""
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "kernel.cubin")
        include = ("-I", str(kernel_directory()))
        keep = ("--keep", f"--keep-dir={directory}") if architecture in ALSO else ()
        flags = (*keep, *COMMON_OPTIONS, *options, *include)
        said = _run(nvcc, "-cubin", f"-arch={architecture}", *flags, "-o", str(cubin), str(source))
        made = [(architecture, cubin)]
        for other in () if said else ALSO.get(architecture, ()):
            (code,) = Path(directory).glob("*.ptx")
            also = Path(directory, f"{other}.cubin")
            ptxas = str(Path(nvcc).with_name("ptxas"))
            said += _run(ptxas, f"-arch={other}", "--generate-line-info", "-o", str(also), str(code))
            made.append((other, also))
        if not said:
            kernels = [(on, read_kernels(path.read_bytes())) for on, path in made]
            return "", Line.of(source.stem, digest, kernels)
    return f"{source.name} {' '.join(options)} for {architecture}:\n{said}", None


def _run(*command: str) -> str:
    """What a compiler complains of; empty where it is content."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and not done.stderr.strip():
        return ""
    return done.stdout + done.stderr or f"{command[0]} ended with {done.returncode}\n"


def of_tests(known: Collection[Line], nvcc: str, version: str) -> Iterator[Line]:
    """The lines that only tests ask for, made anew where their code has changed; dropped where it is gone."""
    paths = {path.stem: path for path in kernel_directory().rglob("*.cu")}
    asked = {(line.file, line.architecture, line.options) for line in known if line.quick}
    by_digest = {line.digest: line for line in known if line.quick}
    for file, architecture, listed in sorted(asked):
        options: list[str] = json.loads(listed)
        if file in paths:
            digest = digest_of(paths[file], (*COMMON_OPTIONS, *options), architecture, version)
            if digest in by_digest:
                yield by_digest[digest]
                continue
            try:
                cubin = compile_quickly(nvcc, paths[file], options, architecture)
            except CompilationError:  # these options are no longer its
                continue
            yield Line.of_quick(file, architecture, digest, read_kernels(cubin), options)


class Resources(NamedTuple):
    """What a kernel takes of a thread's registers, and bytes of stack: spilled registers and arrays."""

    file: str
    kernel: str
    architecture: str
    registers: int
    stack: int

    def __str__(self) -> str:
        return f"{self.file} {self.kernel} for {self.architecture}"

    @property
    def spoilt(self) -> bool:
        """True if it needs more of a stack than it should."""
        most = MOST_STACK.get(f"{self.file} {self.kernel}", MOST_STACK.get(self.file, 0))
        return self.stack > most


def resources(lines: Iterable[Line]) -> Iterator[Resources]:
    """What the kernels of these compilations take."""
    for line in lines:
        for architecture, name, kernel in line.kernels():
            yield Resources(line.file, name, architecture, kernel.registers, kernel.stack)


def write_table(used: Collection[Resources]) -> str:
    """Write registers.txt, the largest stacks first; a summary."""
    rows = sorted(used, key=lambda one: (-one.stack, str(one)))
    lines = (f"{one}: {one.registers} registers, {one.stack} bytes of stack\n" for one in rows)
    table = ROOT / "build" / "kernels" / "registers.txt"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("".join(lines), encoding="utf-8")
    stacked = [one for one in rows if one.stack]
    shown = "; ".join(f"{one} {one.stack}" for one in stacked[:_SHOWN])
    most = f", the largest in bytes: {shown}" if stacked else ""
    return f"{len(stacked)} of {len(rows)} kernels need a stack{most}. All: {table.relative_to(ROOT)}"


if __name__ == "__main__":
    raise SystemExit(main())
