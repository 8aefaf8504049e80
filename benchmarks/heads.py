"""Attention with heads of 64 to 256 elements: how fast it is, what of a step it takes, and by which kernels.

    python -m benchmarks.heads [64 80 96 128 256] [--skip-steps] [--json heads.json]

Two steps of a Qwen2 in the size of Qwen2.5-0.5B but for its heads: 256 sequences decode with 2,048 tokens of
context, and 16 prompts of 2,048 tokens are computed. Attention alone is timed as in `benchmarks.kernels`: by
the bytes of keys and values that decoding reads in a second, and by the FLOPs of prompts. Its share is that
of all layers in what the whole step takes. Heads of each size are measured in a process of their own.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.apart import Apart, ApartError
from benchmarks.family_models import MODELS, QWEN, Heads, full_size, write
from benchmarks.kernels import Bench, attention_cases
from benchmarks.steps import Steps
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu.attention.choice import decode_attention, prefill_attention
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.specs import dense_spec

HEADS = [Heads(14, 2, 64), Heads(12, 2, 80), Heads(10, 2, 96), Heads(7, 1, 128), Heads(4, 1, 256)]
"""With about as many elements of queries, and of keys."""
SEQUENCES, PROMPTS, CONTEXT = 256, 16, 2048
LAYERS = full_size(QWEN).layers
STEPS = 20  # that decode, timed together
LIMIT_S = 180
TITLE = (
    f"| head | query and KV heads | {SEQUENCES} sequences decode, context {CONTEXT:,} | TB/s "
    f"| of the step | {PROMPTS} prompts of {CONTEXT:,} | TFLOP/s | of the step |\n" + "| --- " * 8 + "|"
)


@dataclass(frozen=True)
class Alone:
    """Attention of one layer, by the files that its kernels are in."""

    decode: str
    decode_s: float
    bytes_per_s: float
    prefill: str
    prefill_s: float
    flops: float  # a second


class Measured:
    """Measures heads of one size; `path`: of a model with them."""

    def __init__(self, heads: Heads, path: Path) -> None:
        self._heads = heads
        self._path = path

    def alone(self) -> Alone:
        """The two kernels, on random data."""
        heads = self._heads
        spec = dense_spec(heads=heads.queries, kv_heads=heads.keys, head_dim=heads.size)
        attention = spec.layers[0].attention
        with Device(0) as device:
            decoding = decode_attention(device, attention, max_context=CONTEXT)
            launchers = decoding, prefill_attention(device, attention)
            files = [type(one).sources(spec, hopper=device.hopper)[0][0].name for one in launchers]
            bench = Bench(device)
            cases = attention_cases(
                bench, spec, [(SEQUENCES, CONTEXT)], [(PROMPTS, CONTEXT)], cache_bytes=512 << 20
            )
            timed = [(case, bench.seconds(case.launch, case.rounds)) for case in cases]
        (decode, decode_s), (prefill, prefill_s) = timed
        return Alone(
            files[0], decode_s, decode.bytes / decode_s, files[1], prefill_s, prefill.flops / prefill_s
        )

    def steps(self) -> tuple[float, float]:
        """Seconds of the whole steps: of the one that decodes, and of the one with prompts."""
        with GgufFile.open(self._path) as file:
            runner = CudaRunner(
                file, read_spec(file), slots=SEQUENCES, depth=3, context=CONTEXT + 1,
                max_tokens=PROMPTS * CONTEXT, kv_blocks=SEQUENCES * -(-(CONTEXT + 1) // PAGE),
                report=lambda line: None,
            )  # fmt: skip
        try:
            steps = Steps(runner, CONTEXT + 1)
            steps.fill(CONTEXT)
            decode = steps.batch(range(SEQUENCES), CONTEXT, 1, admit=False)
            prompts = steps.batch(range(PROMPTS), 0, CONTEXT, admit=True)
            return _seconds(runner, decode, STEPS), _seconds(runner, prompts, 1)
        finally:
            runner.close()

    def close(self) -> None:
        """Nothing is kept."""


def _seconds(runner: CudaRunner, batch: StepBatch, at_once: int) -> float:
    """Of a step, when so many follow each other: the median of some rounds after one that does not count."""
    rounds = []
    for _ in range(6):
        began = time.perf_counter()
        outstanding = 0
        for _ in range(at_once):
            if outstanding == runner.depth:
                runner.collect()
                outstanding -= 1
            runner.launch(batch)
            outstanding += 1
        for _ in range(outstanding):
            runner.collect()
        rounds.append((time.perf_counter() - began) / at_once)
    return statistics.median(rounds[1:])


def main() -> None:
    """Measure the sizes that are asked for."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("sizes", nargs="*", type=int, default=[heads.size for heads in HEADS])
    arguments.add_argument("--skip-steps", action="store_true", help="attention alone")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    print(TITLE)
    report, failed = [], False
    for heads in (heads for heads in HEADS if heads.size in options.sizes):
        try:
            alone, steps = measure(heads, skip_steps=options.skip_steps)
        except ApartError as error:
            print(f"| {heads.size} | {error} | | | | | | |", flush=True)
            failed = True
        else:
            print(line(heads, alone, steps), flush=True)
            report.append({"heads": asdict(heads), "alone": asdict(alone), "steps_s": steps})
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    sys.exit(failed)


def measure(heads: Heads, *, skip_steps: bool) -> tuple[Alone, tuple[float, float] | None]:
    """Attention alone, and the steps. Raises ApartError where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        with Apart(Measured, heads, path) as measured:
            alone = measured.call("alone", limit_s=LIMIT_S)
            if skip_steps:
                return alone, None
            write(path, MODELS[QWEN], replace(full_size(QWEN), heads=heads))
            return alone, measured.call("steps", limit_s=LIMIT_S)


def line(heads: Heads, alone: Alone, steps: tuple[float, float] | None) -> str:
    """Of the table."""
    shares = ["", ""]
    if steps is not None:
        taken = LAYERS * alone.decode_s, LAYERS * alone.prefill_s
        shares = [
            f"{own / whole:.0%} of {whole * 1e3:.1f} ms" for own, whole in zip(taken, steps, strict=True)
        ]
    return (
        f"| {heads.size} | {heads.queries}, {heads.keys} | {alone.decode_s * 1e6:,.0f} us, {alone.decode} "
        f"| {alone.bytes_per_s / 1e12:.2f} | {shares[0]} | {alone.prefill_s * 1e6:,.0f} us, {alone.prefill} "
        f"| {alone.flops / 1e12:,.0f} | {shares[1]} |"
    )


if __name__ == "__main__":
    main()
