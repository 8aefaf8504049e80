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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    ModelSpec,
    Norm,
    ShortConv,
)
from nightmill.worker.runners.base import DRAW
from nightmill.worker.runners.gpu.attention.latent import latent_kernels
from nightmill.worker.runners.gpu.attention.scores import scoring
from nightmill.worker.runners.gpu.catalogue import sources_for
from nightmill.worker.runners.gpu.device.compiler import (
    COMMON_OPTIONS,
    included_files,
    kernel_directory,
)
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.device.sources import for_element, members, source_of
from nightmill.worker.runners.gpu.device.waits import BOUNDED_WAITS
from nightmill.worker.runners.gpu.experts.tiles import grouped_source, multipliers
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.rows.predictor import predictor_sources
from nightmill.worker.runners.gpu.sampling.sampler import SLOT
from nightmill.worker.runners.gpu.states.convolution import ShortConvolution
from nightmill.worker.runners.gpu.states.delta_net import DeltaNet
from nightmill.worker.runners.gpu.states.mamba2 import Mamba
from nightmill.worker.runners.kv_format import KvFormat
from tools.cubins import CompilationError, compile_quickly, read_kernels
from tools.kernel_record import ALSO, LOCAL, RECORD, ROOT, Line, digest_of, keep, read_lines, write_lines

HOPPER = "sm_90a"
ARCHITECTURES = ("sm_80", HOPPER, "sm_100")
Job = tuple[Path, tuple[str, ...], str]
"""File, options beside those of all, and architecture."""
MOST_STACK = {
    # once, while a model is loaded: tables that are indexed, angles of any size
    "dequantize": 16, "repack": 16, "qkv_rope rope_table": 40,
    # for sizes of heads that no fast kernel takes, for one type of embeddings, and for tests alone
    "attention_any": 24, "layer_inputs": 8, "sample_reference": 48,
    # outside of loops, or once for a head's state of 64 KiB; rows of more than 4,096 numbers on an RTX 50
    "few_rows": 16, "rms_norm": 8, "unpack": 8, "delta_recurrent": 32, "residual residual_4": 16,
    "combine combine_2": 8, "split_attention split_attention_16": 8,
    # of heads of 256 before Hopper, most of it before the loop: `PortablePrefill.shares_queries` ends it
    "prefill_attention": 48,
    # states of sizes that no model has which runs by these: on Hopper 128 x 128 goes by the files below
    "delta_chunked": 56, "mamba_chunked": 152,
    # on Hopper, where benchmarks/RESULTS.md has their speed; of tiles those that are no faster are not chosen
    "decode_attention": 8, "delta_hopper": 856, "mamba_hopper": 400, "hopper_attention": 168,
    "hopper_gemm": 32, "hopper_qkv": 112, "packed_gemm": 128, "hopper_grouped": 64,
}  # fmt: skip
"""Bytes of stack that kernels may need, by file, or by file and kernel: all others none."""
_SHOWN = 5
BOUNDED = ("few_rows", "hopper_attention", "hopper_split", "split_attention")
"""Files that are compiled with bounded waits, too: together they have every kind of wait."""


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


def every_source() -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """File, options and architecture of what runners compile, so chosen that each risk is met once.

    Each kind of product, of attention and of layer, each size of heads and each element is met on each
    architecture that has it, but with one of the rest, not with all: heads of 64 with half, of 128 with BF16.
    They are compiled from the same templates, and what a combination computes is held by `tests/gpu`, and
    without a GPU by the tests that compile kernels for the host. FP8 weights are for Hopper and Ada, with any
    element.
    """
    bundled = read_spec(GgufFile.open(ROOT / "models" / "nightmill-demo.gguf"))
    other = with_other_parts(bundled)
    large = with_heads(bundled, 128, RopeStyle.PAIRS)
    small = with_heads(bundled, 32, RopeStyle.HALVES)
    sixes = replace(bundled, tensor_types=dict.fromkeys(bundled.tensor_types, "Q6_K"))
    f16, bf16 = Precision(Element.F16), Precision(Element.BF16)
    in_file = WeightsFormat.FILE  # packed weights, in the bundled model Q8_0
    chosen = (
        (other, replace(f16, weights=in_file), (HOPPER, "sm_80")),
        (sixes, replace(bf16, weights=in_file), ("sm_80",)),
        (large, bf16, (HOPPER, "sm_80", "sm_100")),
        (small, f16, ("sm_80",)),
        (small, bf16, (HOPPER, "sm_100")),
        (with_scores(bundled, window=512, sinks=True), f16, (HOPPER, "sm_80")),
        (with_scores(large, window=512, softcap=50.0), bf16, (HOPPER,)),
        (with_scores(bundled, window=512, causal=False), f16, (HOPPER, "sm_80")),
        (with_scores(small, softcap=50.0), f16, (HOPPER,)),
        (with_heads(bundled, 96, RopeStyle.HALVES), f16, (HOPPER,)),
        (with_heads(bundled, 256, RopeStyle.HALVES), bf16, (HOPPER,)),
        (with_heads(bundled, 512, RopeStyle.HALVES), f16, (HOPPER,)),
        (other, replace(f16, weights=WeightsFormat.FP8), (HOPPER,)),
        (bundled, replace(f16, kv=KvFormat.FP8), (HOPPER,)),
        (large, replace(bf16, kv=KvFormat.FP8), ("sm_80",)),
    )
    for spec, precision, architectures in chosen:
        for architecture in architectures:
            sources = sources_for(spec, precision, hopper=architecture == HOPPER)
            yield from ((path, options, architecture) for path, options in sources)
    yield from latent_sources()
    heads = scoring("prefill_attention", with_heads(bundled, 256, RopeStyle.HALVES).attentions[0])
    yield from ((heads[0], (*heads[1], *more), "sm_80") for more in ((), ("-DQUERIES_SHARED=8",)))
    yield (*scoring("wide_attention", with_heads(bundled, 512, RopeStyle.HALVES).attentions[0]), "sm_80")
    for path, options in sources_for(large, replace(bf16, kv=KvFormat.FP8), hopper=False):
        if any(included.name == "e4m3.cuh" for included in included_files(path)):
            yield path, options, "sm_89"
    for path, options in sources_for(other, replace(f16, weights=WeightsFormat.FP8), hopper=False):
        if path.stem == "mma_fp8":
            yield path, options, "sm_89"
    for path, options in sources_for(bundled, f16, hopper=False):
        if path.stem == "decode_attention":  # whose blocks are as many as these have shared memory for
            yield from ((path, options, architecture) for architecture in ("sm_86", "sm_120"))
    yield from state_sources()
    yield from expert_sources()
    for element, architecture in ((Element.F16, HOPPER), (Element.BF16, "sm_80")):
        for source in (source_of("layer_inputs"), *predictor_sources()):
            yield (*for_element(source, element), architecture)
    yield from reference_sources()
    for path, options in sources_for(bundled, f16, hopper=True):
        if path.stem in BOUNDED:
            yield path, (*options, BOUNDED_WAITS), HOPPER


def latent_sources() -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """The same of latent attention."""
    attention = LatentAttention(
        heads=20, key_dim=192, value_dim=256, latent=512, norm=Norm(1e-5), scale=1.0,
        rope=Rope(style=RopeStyle.PAIRS, dim=64, base=1e6),
    )  # fmt: skip
    small = replace(attention, latent=40, rope=replace(attention.rope, dim=8))
    for one, element, architecture in (
        (attention, Element.F16, HOPPER),
        (attention, Element.BF16, "sm_80"),
        (attention, Element.BF16, "sm_100"),
        (small, Element.F16, HOPPER),
    ):
        for source in latent_kernels(one, hopper=architecture == HOPPER):
            yield (*for_element(source, element), architecture)


def state_sources() -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """The same of layers with states, of the sizes that models have and some others."""
    plain = Norm(1e-6)
    delta = GatedDeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, norm=plain)
    mamba = Mamba2(heads=64, head_dim=64, groups=8, state_size=128, kernel=4, norm=plain)
    of_short = [*ShortConvolution.sources(ShortConv(width=2048, kernel=3)), source_of("copy_states")]
    of_delta = DeltaNet.sources(delta)
    on_hopper = [*DeltaNet.sources(delta, hopper=True), *Mamba.sources(mamba, hopper=True)]
    other_delta = DeltaNet.sources(replace(delta, key_dim=96, value_dim=64, kernel=2))
    other_mamba = Mamba.sources(replace(mamba, head_dim=80, state_size=256, kernel=3))
    for sources, element, architecture in (
        ([*of_short, *on_hopper], Element.F16, HOPPER),
        ([*of_short, *of_delta], Element.BF16, "sm_80"),
        (of_delta, Element.F16, "sm_100"),
        ([*other_delta, *other_mamba], Element.BF16, HOPPER),
    ):
        yield from ((*for_element(source, element), architecture) for source in sources)


def expert_sources() -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """The same of mixtures of experts, with weights of each kind."""
    around = [source_of("route"), source_of("combine")]
    for format_, element, architecture in (
        (Format.F16, Element.F16, HOPPER),
        (Format.BF16, Element.BF16, "sm_80"),
        (Format.FP8, Element.BF16, HOPPER),
        (Format.FP8, Element.F16, "sm_89"),
        (Format.Q4_K, Element.BF16, HOPPER),
        (Format.Q6_K, Element.F16, HOPPER),
        (Format.MXFP4, Element.F16, "sm_100"),
    ):
        by = multipliers(format_, hopper=architecture == HOPPER)
        sources = [*([] if architecture == "sm_89" else around), *(grouped_source(format_, on) for on in by)]
        yield from ((*for_element(source, element), architecture) for source in sources)


def reference_sources() -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """The readable kernels, which tests alone launch."""
    records = (members("SLOT_MEMBERS", SLOT), members("DRAW_MEMBERS", DRAW))
    yield (*source_of("sample_reference", *records), HOPPER)
    of_elements = [source_of(f"{name}_reference") for name in ("product", "fp8", "rms_norm")]
    packed = [source_of("packed_reference", f"-DFORMAT={name}") for name in ("Q4_K", "Q8_0")]
    rope = [source_of("rope_reference", "-DHEAD_DIM=128", f"-DINTERLEAVED={pairs}") for pairs in (0, 1)]
    for source in (*of_elements, *packed, *rope):
        for element, architecture in ((Element.F16, HOPPER), (Element.BF16, "sm_80")):
            yield (*for_element(source, element), architecture)


def with_heads(spec: ModelSpec, size: int, style: RopeStyle) -> ModelSpec:
    """The model with heads of another size, rotated in that style."""
    layer = spec.layers[0]
    rope = replace(layer.attention.rope, dim=size, style=style)
    attention = replace(layer.attention, head_dim=size, rope=rope)
    return replace(spec, layers=(replace(layer, mixer=attention),) * len(spec.layers))


def with_scores(spec: ModelSpec, **scores: Any) -> ModelSpec:
    """The model with other attention in its last layer."""
    *layers, last = spec.layers
    return replace(spec, layers=(*layers, replace(last, mixer=replace(last.attention, **scores))))


def with_other_parts(spec: ModelSpec) -> ModelSpec:
    """The model with GeGLU, norms after and another type of values in its last layer, and scaled logits."""
    *layers, last = spec.layers
    other = replace(
        last,
        feed_forward=replace(last.feed_forward, activation=Activation.GELU),
        attention_post_norm=spec.output_norm,
        feed_forward_post_norm=spec.output_norm,
    )
    types = {**spec.tensor_types, f"blk.{len(layers)}.attn_v.weight": "Q6_K"}
    return replace(spec, layers=(*layers, other), logit_scale=0.5, tensor_types=types)


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
