"""Whether packed weights are as fast as 16 bits at every number of rows, and which kernels they take.

    python -m benchmarks.rows MODEL.gguf [OTHER.gguf ...] [--rows 1 2 4 ... 4096]

A row is a sequence that decodes one token, over a context of CONTEXT. The first file's weights in 16 bits are
what the weights of each file, as they are there, are held against: files of one shape. Times are of a CUDA
graph: of the products of all layers with the LM head, in their order, and of the whole step; medians of
replays. A replay is short, so clocks are those of a GPU that is not warm: `benchmarks.engine` has sustained
rates. Prints a JSON line for each format and number of rows, then a table in Markdown.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.budget import prepared, queue, recorded, timed
from benchmarks.steps import FILL, Steps
from nightmill.worker.commands.inspection import quantisation_of, shares
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.element_choice import choose_element
from nightmill.worker.runners.gpu.kv_cache import PAGE
from nightmill.worker.runners.gpu.numbers import Numbers, WeightNumbers
from nightmill.worker.runners.gpu.products.shapes import padded_rows
from nightmill.worker.runners.gpu.runner import CudaRunner

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
CONTEXT = PAGE  # tokens: attention is to take little of a step
PRODUCTS = ("qkv", "output", "gate_up and swiglu", "down", "head")


@dataclass(frozen=True)
class Timing:
    """Of a step of so many rows, in seconds; `ways`: which kernel each product takes."""

    weights: str
    rows: int
    products: float
    step: float
    ways: dict[str, str]


def main() -> None:
    """Time each format in turn, each on a runner of its own."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    arguments.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options = arguments.parse_args()
    found: list[Timing] = []
    packed = [(path, WeightNumbers.FILE) for path in options.models]
    for path, kept in [(options.models[0], WeightNumbers.ELEMENT), *packed]:
        for timing in timings(path, kept, options.rows):
            print(json.dumps(asdict(timing)), flush=True)
            found.append(timing)
    print("\n".join(["", *table(found)]))


def timings(path: Path, kept: WeightNumbers, counts: Sequence[int]) -> Iterator[Timing]:
    """Of one format, for each number of rows."""
    file = GgufFile.open(path)
    spec = read_spec(file)
    most, longest = max(counts), CONTEXT + 1
    runner = CudaRunner(
        file, spec, slots=most, context=longest, kv_blocks=most * -(-longest // PAGE), graphs=False,
        max_tokens=max(most, FILL), numbers=Numbers(choose_element(file, spec, "auto").element, kept),
        report=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    name = "16 bits" if kept is WeightNumbers.ELEMENT else shares(quantisation_of(file))[0].split()[0]
    try:
        steps = Steps(runner, longest)
        steps.fill(CONTEXT)
        for rows in counts:
            step = prepared(runner, steps.batch(range(rows), CONTEXT, 1, admit=False))
            calls = [call for called, call in recorded(runner._model, *step) if called in PRODUCTS]
            runner.device.synchronize()
            products, _ = timed(runner, lambda calls=calls: [call() for call in calls] and None)
            whole, _ = timed(runner, lambda step=step: queue(runner._model, *step))
            tuned = {product: ways.get(padded_rows(rows)) for product, ways in runner.products().items()}
            ways = {product: way for product, way in tuned.items() if way}  # fused kernels are not tuned
            yield Timing(name, rows, products, whole, ways)
    finally:
        runner.close()


def table(found: Sequence[Timing]) -> list[str]:
    """Lines of Markdown: microseconds of 16 bits, and what the others take of that."""
    of = {(timing.weights, timing.rows): timing for timing in found}
    base, *others = dict.fromkeys(timing.weights for timing in found)
    columns = ["rows", f"{base}: products, us", "step, us"]
    for name in others:
        columns += [f"{name}: products", "step"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for rows in dict.fromkeys(timing.rows for timing in found):
        held = of[base, rows]
        cells = [f"{rows:,}", f"{held.products * 1e6:,.0f}", f"{held.step * 1e6:,.0f}"]
        for timing in (of[name, rows] for name in others):
            cells += [f"{timing.products / held.products:.2f}", f"{timing.step / held.step:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
