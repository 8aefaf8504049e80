"""Kernels of mixtures of experts: microseconds a layer, and shares of a card's memory or tensor cores.

    python -m benchmarks.experts [--shape qwen3-30b-a3b] [--formats Q4_K Q6_K] [--rows 1 64 256 8192] [--skew]
    python -m benchmarks.experts --every [--rows 1 64 256 8192] [--skew]

A layer with random weights, in the formats of gate and up and of down, for so many tokens that random logits
route. Few rows go through several layers, since their experts would stay in L2 else. `layer` is the graph of
all launches, one layer after the other; the others are launches of one kernel. `--skew` sends the first of
each eight experts five times as many tokens as the mean. `--every` measures all shapes, in the formats that
their files have and, of Qwen3, in FP8 and 16 bits. A JSON line a case; bytes and FLOPs are the least.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from benchmarks.kernels import Bench
from nightmill.worker.model.spec import Activation, Experts, RouterScores
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import for_element, source_of
from nightmill.worker.runners.gpu.experts.combine import Combine
from nightmill.worker.runners.gpu.experts.grouped import Given, GroupedProducts
from nightmill.worker.runners.gpu.experts.room import ExpertRoom
from nightmill.worker.runners.gpu.experts.route import Routing
from nightmill.worker.runners.gpu.experts.tiles import (
    ExpertTile,
    grouped_source,
    multipliers,
    tiles_for,
)
from nightmill.worker.runners.gpu.products.fp8.quantise import Quantise
from nightmill.worker.runners.gpu.rows.norms import Ending
from nightmill.worker.runners.gpu.weights.layout import NormWeight
from nightmill.worker.runners.gpu.weights.router import part_rows
from tests.support.blocks import random_blocks
from tests.support.packed_weights import packed
from tests.support.specs import mixture

SHAPES = {
    "qwen3-30b-a3b": (Experts(count=128, used=8, width=768, normalise=True), 2048),
    "gpt-oss-20b": (
        Experts(
            count=32, used=4, width=2880, activation=Activation.CLAMPED_SWIGLU, bias=True,
            scores=RouterScores.SOFTMAX_OF_CHOSEN,
        ),
        2880,
    ),
    "glm-4.7-flash": (
        Experts(count=64, used=4, width=1536, scores=RouterScores.SIGMOID, normalise=True, scale=1.8), 2048,
    ),
    "deepseek-v2-lite": (Experts(count=64, used=6, width=1408), 2048),
}  # fmt: skip
EVERY = (
    ("qwen3-30b-a3b", "Q4_K", "Q6_K"), ("qwen3-30b-a3b", "Q4_K", "Q4_K"), ("qwen3-30b-a3b", "FP8", "FP8"),
    ("qwen3-30b-a3b", "F16", "F16"), ("gpt-oss-20b", "MXFP4", "MXFP4"), ("glm-4.7-flash", "Q4_K", "Q6_K"),
    ("deepseek-v2-lite", "Q5_0", "Q8_0"),
)  # fmt: skip
"""Shapes, and formats of gate and up, and of down, as in files: rows of 1,408 have no blocks of 256."""
OFTEN, TRIED = 5.0, 4096  # of the mean, with --skew; rows that it is tried on
FEW, LAYERS = 64, 6  # rows, up to which there are so many layers


class Layer:
    """A layer's weights, and its buffers, with tokens on their way to experts."""

    def __init__(
        self, bench: Bench, experts: Experts, width: int, formats: tuple[Format, Format],
        grouped: GroupedProducts, rows: int, skew: bool,
    ) -> None:  # fmt: skip
        self.device, self.experts, self.width, self.rows = bench.device, experts, width, rows
        device, self.fp8 = bench.device, formats[0] is Format.FP8
        self.gate_up = experts_of(bench, formats[0], experts.count, 2 * experts.width, width)
        self.down = experts_of(bench, formats[1], experts.count, width, experts.width)
        spec = replace(mixture(experts), width=width)
        address = device.allocate(ExpertRoom.workspace(spec, rows, fp8=self.fp8))
        self.at = ExpertRoom.at(address, experts, width, rows, fp8=self.fp8)
        logits = bench.rng.standard_normal((rows, experts.count))
        if skew:
            logits[:, ::8] += more_of_some(experts)
        held = np.zeros((rows, self.at.logits.shape[1]), dtype=np.float32)
        held[:, : experts.count] = logits
        assert part_rows(experts.count) >= experts.count
        device.copy_in(self.at.logits.address, held)
        self.x, self.out = bench.random(rows, width), bench.random(rows, width)
        self.stream = bench.random(rows, width, dtype=np.float32)
        self.norm = bench.random(width, dtype=np.float32)
        self.routing, self.grouped = Routing(device, experts), grouped
        self.combine = Combine(device)
        self.quantise = Quantise(device) if self.fp8 else None
        self.entering = self._rounded(self.x, self.at.read_fp8, rows)
        self.take(self.grouped.tile(experts, rows))
        device.synchronize()
        self.sent = np.bincount(
            device.download(self.at.chosen.address, (rows * experts.used,), np.int32), minlength=experts.count
        )

    def take(self, tile: ExpertTile) -> None:
        """Place tokens for tiles of another size."""
        self.tile = tile
        self.route()

    def _rounded(self, x: Buffer, target: Buffer, rows: int) -> Buffer:
        if self.quantise is None:
            return x
        self.quantise(x.address, target.address, target.scales, rows, x.shape[1])
        return target

    def route(self) -> None:
        self.routing(ABSENT, ABSENT, self.at, self.rows, self.tile)

    def place(self) -> None:
        self.routing.place(self.at, self.rows, self.tile)

    def multiply_gate_up(self) -> None:
        self.grouped.gate_up(
            self.experts, self.entering, self.gate_up, Given(), self.at, self.rows, self.tile
        )

    def multiply_down(self) -> None:
        positions = self.rows * self.experts.used
        x = self._rounded(self.at.activated, self.at.activated_fp8, positions)
        self.grouped.down(self.experts, x, self.down, Given(), self.at, self.rows, self.tile)

    def add(self) -> None:
        ending = Ending(before=NormWeight(self.norm, 1e-6))
        self.combine.add(self.experts, self.at, ABSENT, ending, self.stream, self.out, self.rows)

    def whole(self) -> None:
        self.route()
        self.multiply_gate_up()
        self.multiply_down()
        self.add()


def compile_for(formats: set[Format], *, all_tiles: bool) -> None:
    """Compile all kernels at once: each would be when it is first launched, one after the other."""
    with Device(0) as device:
        tiles = [tile for kept in formats for tile in tiles_of((kept, kept), device, all_tiles=all_tiles)]
        files = [source_of(name) for name in ("route", "combine", "quantise")]
        for kept in formats:
            by = {tile.by for tile in tiles}.intersection(multipliers(kept, hopper=device.hopper))
            files += [grouped_source(kept, one) for one in sorted(by, key=str)]
        compile_all([for_element(one, device.element) for one in files], device.architecture)


def tiles_of(formats: tuple[Format, Format], device: Device, *, all_tiles: bool) -> tuple[ExpertTile, ...]:
    """The tiles that experts in these formats have, or all that could compute them."""
    own = tiles_for(formats, hopper=device.hopper)
    if not all_tiles:
        return own
    able = set.intersection(*(set(multipliers(one, hopper=device.hopper)) for one in formats))
    elements, mixed = [Format.F16], [Format.F16, Format.Q4_K]
    every = [*own, *(tile for one in (elements, mixed) for tile in tiles_for(one, hopper=device.hopper))]
    return tuple(tile for tile in dict.fromkeys(every) if tile.by in able)


def more_of_some(experts: Experts) -> float:
    """What makes logits of one expert of eight so much larger that it is chosen OFTEN times the mean."""
    logits = np.random.default_rng(0).standard_normal((TRIED, experts.count))
    some = np.arange(experts.count) % 8 == 0
    least, most = 0.0, 8.0
    while most - least > 0.01:
        more = (least + most) / 2
        chosen = np.argpartition(logits + more * some, -experts.used, axis=1)[:, -experts.used :]
        often = some[chosen].mean() / some.mean()
        least, most = (more, most) if often < OFTEN else (least, more)
    return most


def blocks_of(bench: Bench, kept: Format, rows: int, columns: int) -> np.ndarray:
    """Random rows as bytes of a file."""
    kind = GGMLQuantizationType[kept.name]
    blocks = random_blocks(kind, rows * columns // GGML_QUANT_SIZES[kind][0])
    if kept is Format.MXFP4:
        blocks[:, 0] = bench.rng.integers(112, 120, len(blocks))  # exponents with which numbers are halves
    return blocks.reshape(rows, -1)


def experts_of(bench: Bench, kept: Format, count: int, rows: int, columns: int) -> Matrix:
    """Weights of so many experts: one's, again and again."""
    import pycuda.driver as cuda

    device, scales = bench.device, 0
    if kept.packed:
        one = packed(device, kept, blocks_of(bench, kept, rows, columns), columns).address
    elif kept is Format.FP8:
        one = device.upload(bench.rng.integers(0, 120, (rows, columns), dtype=np.uint8))
        scales = bench.random(count * rows, dtype=np.float32, scale=1e-3).address
    else:
        one = bench.random(rows, columns, scale=0.02).address
    size = kept.bytes(rows, columns)
    whole = device.allocate(count * size)
    for expert in range(count):
        cuda.memcpy_dtod_async(whole + expert * size, one, size, device.stream)
    device.synchronize()
    device.free(one)
    return Matrix(whole, count * rows, columns, kept, scales)


def measure(
    bench: Bench, shape: str, formats: tuple[Format, Format], rows: int, *, skew: bool, all_tiles: bool
) -> Iterator[dict[str, Any]]:
    """A line for a layer with so many tokens, for the tile that it has, or for each."""
    experts, width = SHAPES[shape]
    tiles = tiles_of(formats, bench.device, all_tiles=all_tiles)
    grouped = GroupedProducts(bench.device, set(formats), tiles)
    layers = [
        Layer(bench, experts, width, formats, grouped, rows, skew)
        for _ in range(LAYERS if rows <= FEW else 1)
    ]
    for tile in grouped.tiles if all_tiles else [layers[0].tile]:
        if not rows * experts.used / experts.count < 16 * tile.rows:
            continue
        for layer in layers:
            layer.take(tile)
        yield line_of(bench, layers, {"shape": shape, "formats": "/".join(one.name for one in formats)})


def line_of(bench: Bench, layers: list[Layer], line: dict[str, Any]) -> dict[str, Any]:
    """Times of all launches."""
    first, experts = layers[0], layers[0].experts
    touched = float(np.mean([np.count_nonzero(layer.sent) for layer in layers]))

    def us(launch: Callable[[Layer], None]) -> float:
        return bench.seconds(lambda i: launch(layers[i]), len(layers)) * 1e6

    line |= {
        "rows": first.rows, "tile": f"{first.tile.by.value} {first.tile.rows}", "touched": round(touched),
        "most": int(first.sent.max()),
    }  # fmt: skip
    for name, launch, matrix in (
        ("gate_up", Layer.multiply_gate_up, first.gate_up), ("down", Layer.multiply_down, first.down),
    ):  # fmt: skip
        took = us(launch)
        moved = matrix.bytes * touched / experts.count
        flops = 2 * first.rows * experts.used * (matrix.rows // experts.count) * matrix.columns
        line |= {name: round(took, 1), f"{name}_gb_s": round(moved / took / 1e3)}
        line[f"{name}_tflops"] = round(flops / took / 1e6, 1)
    for name, launch in (("route", Layer.route), ("combine", Layer.add), ("layer", Layer.whole)):
        line[name] = round(us(launch), 1)
    return line


def main() -> None:
    """Measure what the command line names."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    arguments.add_argument("--formats", nargs=2, default=["Q4_K", "Q6_K"], metavar="FORMAT")
    arguments.add_argument("--rows", type=int, nargs="+", help="1 to 8,192, where none are given")
    arguments.add_argument("--skew", action="store_true")
    arguments.add_argument("--all-tiles", action="store_true", help="time each tile, not that which is taken")
    arguments.add_argument("--every", action="store_true", help="all shapes, in the formats of their files")
    options = arguments.parse_args()
    all_rows = options.rows or [1, 8, 64, 256, 1024, 8192]
    cases = EVERY if options.every else ((options.shape, *options.formats),)
    kept = {Format[name] for _, *names in cases for name in names}
    compile_for(kept, all_tiles=options.all_tiles)
    for (shape, first, second), rows in product(cases, all_rows):
        formats = Format[first], Format[second]
        with Device(0) as device:
            bench = Bench(device)
            lines = measure(bench, shape, formats, rows, skew=options.skew, all_tiles=options.all_tiles)
            for line in lines:
                print(json.dumps({"gpu": device.name} | line), flush=True)


if __name__ == "__main__":
    main()
