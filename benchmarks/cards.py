"""Times the same steps of a model on a GPU as itself, and taken for other cards.

    python -m benchmarks.cards MODEL.gguf [--card rtx3090 ...] [--weights file] [--rows 1 8 64 256]

Each card is a process of its own. A line of JSON for each: milliseconds a step of so many sequences with
contexts of --context tokens, and of a step of prompts; then a table for people, on standard error: the share
of the GPU's own time that the card's kernels take, and beside it the forecast for the real card, which rests
on what is counted (bytes of weights, keys and values, FLOPs) and on the card's data sheet. A share says what
kernels cost that a card takes in place of the GPU's own, on this GPU, whose memory and tensor cores they use:
it is no speed of that card.

Compiles kernels for each card, if they are not kept: a minute or two for the first run. --no-tune takes the
first guess of each product in place of timing all. Needs a Hopper GPU; about 20 s a card afterwards.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common.options import add_formats, precision_from
from benchmarks.common.steps import FILL, Steps
from nightmill.worker.assembly.forecast import Card, card_of
from nightmill.worker.assembly.speed import GpuSpeed, StepCost, WeightsAndCache, step_cost
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu.device.chosen import ChosenGpu
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS, known_card
from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
from nightmill.worker.runners.gpu.launches import Launching
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.runner import CudaRunner

CARDS = ("rtx3090", "a100", "rtx4090", "rtx5090")
ITSELF = "itself"
TIMED = 20  # steps


def main() -> None:
    """Time them all, each in a process of its own, or, with --only, one."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model")
    add_formats(arguments)
    arguments.add_argument("--card", action="append", choices=sorted(KNOWN_CARDS), help="may be repeated")
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments.add_argument("--context", type=int, default=512)
    arguments.add_argument("--prompts", type=int, default=4096, help="tokens of a step of prompts")
    arguments.add_argument("--no-tune", action="store_true")
    arguments.add_argument("--seconds", type=float, default=120.0, help="for each card, then it is cut")
    arguments.add_argument("--only", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.only is not None:
        print(json.dumps(measured(options)), flush=True)
        return
    found = [line for card in (ITSELF, *(options.card or CARDS)) if (line := of_card(card, options.seconds))]
    print("\n".join(table(found)), file=sys.stderr)


def of_card(card: str, seconds: float) -> dict[str, Any] | None:
    """Measure as one card; None if that failed, which is said."""
    command = [sys.executable, "-m", "benchmarks.cards", *sys.argv[1:], "--only", card]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"{card}: cut after {seconds:.0f} s", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{card}: exit code {done.returncode}", file=sys.stderr)
        return None
    print(done.stdout.strip(), flush=True)
    print(f"{card}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Time the steps in this process."""
    file = GgufFile.open(options.model)
    spec = read_spec(file)
    card = None if options.only == ITSELF else known_card(options.only)
    length = min(options.prompts, options.context)
    prompts = options.prompts // length
    longest, slots = max(options.context + 1, FILL // 16), max(*options.rows, prompts)
    runner = CudaRunner(
        file, spec,
        RunnerSizes(
            slots=slots, context=longest, max_tokens=max(options.prompts, FILL),
            kv_pages=slots * -(-longest // PAGE),
        ),
        launching=Launching(graphs=not options.no_tune, tune=not options.no_tune),
        gpu=ChosenGpu(0, card), precision=precision_from(options, file, spec),
        report=lambda line: print(f"{options.only}: {line}", file=sys.stderr),
    )  # fmt: skip
    try:
        steps = Steps(runner, longest)
        steps.fill(options.context)
        decode = {
            rows: milliseconds(runner, steps.batch(range(rows), options.context, 1, admit=False))
            for rows in options.rows
        }
        reading = steps.batch(range(prompts), 0, length, admit=True)
        described = card_of(card) if card is not None else here(runner)
        size = WeightsAndCache(
            runner.memory.weights, page_bytes(spec, runner.precision.kv), runner.precision.weights
        )
        speed = GpuSpeed(described.peaks, described.multiprocessors)
        counted = {rows: step_cost(spec, speed, size, rows, options.context) for rows in options.rows}
        return {
            "card": options.only, "gpu": runner.device.name, "model": spec.name,
            "weights": runner.precision.weights.value, "context": options.context,
            "decode_ms": decode, "prompts_ms": milliseconds(runner, reading),
            "forecast": {rows: told(cost) for rows, cost in counted.items()},
        }  # fmt: skip
    finally:
        runner.close()


def here(runner: CudaRunner) -> Card:
    """The GPU as itself."""
    device = runner.device
    return Card(
        device.name, device.free_memory(), device.multiprocessors, device.peaks(), device.hopper, device.fp8
    )


def told(cost: StepCost) -> dict[str, Any]:
    """A forecast with what it rests on."""
    return asdict(cost) | {"ms": cost.seconds * 1e3, "bound": cost.bound}


def milliseconds(runner: CudaRunner, batch: StepBatch) -> float:
    """Time a step: as many are under way as the runner takes."""
    for turn in range(TIMED + runner.depth):
        if turn == runner.depth:
            began = time.perf_counter()
        if turn >= runner.depth:
            runner.collect()
        runner.launch(batch)
    for _ in range(runner.depth):
        runner.collect()
    return round((time.perf_counter() - began) * 1e3 / (TIMED + runner.depth), 4)


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table of shares and forecasts, if the GPU was measured as itself."""
    own = next((one for one in found if one["card"] == ITSELF), None)
    if own is None:
        return ["the GPU was not measured as itself: no shares"]
    rows = list(own["decode_ms"])
    lines = [
        "| as | " + " | ".join(f"{row} at once" for row in rows) + " | prompts | forecast, ms a step |",
        "| --- " * (len(rows) + 3) + "|",
    ]
    for one in found:
        shares = [f"{one['decode_ms'][row]:.2f} ms" for row in rows] + [f"{one['prompts_ms']:.1f} ms"]
        if one is not own:
            shares = [f"{one['decode_ms'][row] / own['decode_ms'][row]:.2f}" for row in rows]
            shares.append(f"{one['prompts_ms'] / own['prompts_ms']:.2f}")
        forecast = ", ".join(f"{one['forecast'][row]['ms']:.2g}" for row in rows)
        lines.append(f"| {one['card']} | {' | '.join(shares)} | {forecast} |")
    return lines


if __name__ == "__main__":
    main()
