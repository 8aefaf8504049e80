"""Where a step's time goes: each operation alone against its floor, and their sum against the whole step.

    python -m benchmarks.budget MODEL.gguf [--context 512] [--batch 1 256 1024] [--prefill 16384]

An operation is measured in a CUDA graph that holds its launches of all layers and nothing else, so that the
weights and caches of 24 layers go by, and not one set that stays in L2; the step is the graph of all
launches. Both are medians of replays between two events. The floor is the larger of bytes over the rate of a
device copy and FLOPs over that of a large FP16 product, as measured on an H200 (--bytes-per-s, --flops);
bytes are the least that must move, with what one kernel hands to the next counted, although L2 may hold it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.operations import Tail, queue, recorded
from benchmarks.common.options import add_formats, precision_from
from benchmarks.common.step_costs import Costs, Sizes
from benchmarks.common.steps import FILL, Steps
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu.decode_graphs import decode_shape
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.kv_cache import PAGE, kinds_layout
from nightmill.worker.runners.gpu.launches import Launching
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.gpu.steps import padded_lengths
from tests.support.limits import BYTES_PER_S, FLOPS

PROMPT = 1024  # tokens of each sequence in the prefill step
REPLAYS = 9


@dataclass
class Line:
    """One operation in a step, or the step: launches, bytes and FLOPs of all layers, and seconds."""

    operation: str
    launches: int
    bytes: int
    flops: int
    floor_s: float
    seconds: float


def measure(runner: CudaRunner, batch: StepBatch, costs: Costs, rates: tuple[float, float]) -> Iterator[Line]:
    """Each operation of this step alone, then the whole step."""
    model = runner._model
    inputs, shape, tail = prepared(runner, batch)
    calls = recorded(model, inputs, shape, tail)
    runner.device.synchronize()
    routed = next((at for at, (name, _) in enumerate(calls) if name == "route"), -1)
    for name in dict.fromkeys(name for name, _ in calls):
        # Experts multiply what was routed last: else of the last layer, where few tokens go on.
        for _, call in calls[: routed + 1]:
            call()
        mine = [call for other, call in calls if other == name]
        moved, flops = costs.of.get(name, (0, 0))
        seconds, nodes = timed(runner, lambda mine=mine: [call() for call in mine] and None)
        yield Line(name, nodes, moved, flops, max(moved / rates[0], flops / rates[1]), seconds)
    seconds, nodes = timed(runner, lambda: queue(model, inputs, shape, tail))
    yield Line("step", nodes, 0, 0, 0.0, seconds)


def prepared(runner: CudaRunner, batch: StepBatch) -> tuple[StepInputs, StepShape, Tail]:
    """A step's arrays on the GPU, and those of its rows that draw, if layers take these alone.

    Products of drawn tokens are tuned for so many rows.
    """
    size = len(batch.slots)
    if len(batch.tokens) == batch.drawn:
        runner._model.tune(size, size)
        pieces = runner._plans.pieces(padded_lengths(batch, size), np.arange(size, dtype=np.int32))
        shape = decode_shape(size, rooms := tuple(map(len, pieces)))
        inputs = runner._steps.write_padded(0, batch, size, pieces, rooms)
    else:
        tiles, pieces, ((first, _, groups), *further) = runner._plans.divide(0, batch)
        shape = StepShape(
            len(batch.tokens), size, 0, len(batch.draws), first, groups=groups, further=tuple(further)
        )
        inputs = runner._steps.write(0, batch, shape, tiles, pieces)
    tail = None if runner._tail is None else runner._tail.write(0, batch, shape)
    return inputs, shape, tail


def timed(runner: CudaRunner, launch: Callable[[], None]) -> tuple[float, int]:
    """Seconds of a replay of what `launch` queues, and its launches."""
    device = runner.device
    graph = Graph(device, launch)
    begin, end = device.event(timing=True), device.event(timing=True)
    times = []
    for replay in range(REPLAYS + 2):
        begin.record(device.stream)
        graph.launch()
        end.record(device.stream)
        end.synchronize()
        if replay >= 2:
            times.append(end.time_since(begin) * 1e-3)
    nodes = graph.nodes
    graph.close()
    return float(np.median(times)), nodes


def show(title: str, lines: list[Line]) -> None:
    """Print a table in Markdown."""
    step, parts = lines[-1], lines[:-1]
    print(f"\n{title}\n\n| operation | launches | MB | GFLOP | floor, us | measured, us | floor / measured |")
    print("|---|---|---|---|---|---|---|")
    for line in sorted(parts, key=lambda line: -line.seconds):
        share = f"{line.floor_s / line.seconds:.0%}" if line.floor_s else "-"
        print(
            f"| {line.operation} | {line.launches} | {line.bytes / 1e6:,.1f} | {line.flops / 1e9:,.1f} "
            f"| {line.floor_s * 1e6:,.1f} | {line.seconds * 1e6:,.1f} | {share} |"
        )
    floor, total = sum(line.floor_s for line in parts), sum(line.seconds for line in parts)
    print(f"| sum | {sum(line.launches for line in parts)} | | | {floor * 1e6:,.1f} | {total * 1e6:,.1f} | |")
    print(f"| whole step | {step.launches} | | | | {step.seconds * 1e6:,.1f} | {floor / step.seconds:.0%} |")
    print(
        f"\nOutside the operations (launch boundaries, idle): {(step.seconds - total) * 1e6:,.1f} us",
        flush=True,
    )


def main() -> None:
    """Measure the decode steps and the prefill step that are asked for."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model")
    add_formats(arguments)
    arguments.add_argument("--context", type=int, default=512)
    arguments.add_argument("--batch", type=int, nargs="*", default=[1, 256, 1024])
    arguments.add_argument("--prefill", type=int, default=16384)
    arguments.add_argument("--bytes-per-s", type=float, default=BYTES_PER_S)
    arguments.add_argument("--flops", type=float, default=FLOPS)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    file = GgufFile.open(options.model)
    spec = read_spec(file)
    precision = precision_from(options, file, spec)
    longest = max(PROMPT, options.context + 1)
    sequences = max([*options.batch, options.prefill // PROMPT])  # --batch may name none
    layout = kinds_layout(spec, precision.kv)
    runner = CudaRunner(
        file,
        spec,
        RunnerSizes(
            slots=sequences,
            context=longest,
            max_tokens=max(options.prefill, FILL),
            kv_pages=sequences * (-(-longest // PAGE) if layout is None else layout.pages_for(longest)),
        ),
        launching=Launching(graphs=False),
        precision=precision,
        report=lambda line: print(line, file=sys.stderr),
    )
    rates = options.bytes_per_s, options.flops
    report: dict[str, Any] = {
        "gpu": runner.device.name, "model": spec.name, "weights": precision.weights.value,
        "kv": precision.kv.value, "context": options.context,
    }  # fmt: skip
    try:
        steps = Steps(runner, longest)
        if options.batch:
            steps.fill(options.context)
        for size in options.batch:
            batch = steps.batch(range(size), options.context, 1, admit=False)
            costs = Costs(spec, precision, runner._model, Sizes(size, options.context, 1))
            lines = list(measure(runner, batch, costs, rates))
            show(f"Decode, batch {size}, context {options.context}", lines)
            report[f"decode {size}"] = [asdict(line) for line in lines]
        if options.prefill:
            count = options.prefill // PROMPT
            batch = steps.batch(range(count), 0, PROMPT, admit=True)
            costs = Costs(spec, precision, runner._model, Sizes(count, 0, PROMPT))
            runner.launch(batch)
            runner.collect()
            lines = list(measure(runner, batch, costs, rates))
            show(f"Prefill, {count} prompts of {PROMPT}", lines)
            report["prefill"] = [asdict(line) for line in lines]
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
    finally:
        runner.close()


if __name__ == "__main__":
    main()
