"""Times every way there is to multiply with packed weights, and compares their bits.

    python -m benchmarks.products down:Q4_K:1,64,256 head:Q6_K:1 qkv-0.5B:Q8_0:1 [--only relay]

A product is a name, a type of GGUF's and numbers of rows. Names are those of PRODUCTS, of Qwen2.5-7B's shape,
or with -0.5B behind them of the 0.5B's. Launches are in a CUDA graph that goes round through copies of the
weights larger than L2, medians of replays; a replay is short, so clocks are those of a GPU that is not warm.
Prints a JSON line for each way: `same` says whether its results have the bits of the first one's. --only: the
first, and ways whose names have this in them.

NIGHTMILL_PRETEND_DEVICE=rtx4090 times what that card would run, on this GPU: shares of its time, no other.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from benchmarks.kernels import Bench, rounds_for
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import for_element
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedTiles
from nightmill.worker.runners.gpu.shapes import SUMMED, Kind, Shape, padded_rows
from tests.support.cuda_runners import pretended_card
from tests.support.operands import products_with, room
from tests.support.packed_weights import packed, weights_of

PRODUCTS = {  # outputs and inputs of a 7B, of a 0.5B
    "qkv": (Kind.PLAIN, (4608, 3584), (1152, 896)),
    "output": (Kind.RESIDUAL, (3584, 3584), (896, 896)),
    "gate_up": (Kind.SWIGLU, (18_944, 3584), (4864, 896)),
    "down": (Kind.RESIDUAL, (3584, 18_944), (896, 4864)),
    "head": (Kind.FLOAT, (152_064, 3584), (151_936, 896)),
}
SMALL = "-0.5B"
REPEATED = 8  # times that a large matrix has the same rows, which are random
LARGE = 40_000  # rows from which on


def shape_of(text: str) -> tuple[str, Shape, list[int]]:
    """What NAME:TYPE:ROWS asks for."""
    try:
        name, kept, rows = text.split(":")
        kind, large, small = PRODUCTS[name.removesuffix(SMALL)]
        outputs, inputs = small if name.endswith(SMALL) else large
        return name, Shape(0, outputs, inputs, kind, Format[kept]), [int(each) for each in rows.split(",")]
    except (KeyError, ValueError):
        known = ", ".join(PRODUCTS)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME:TYPE:ROWS, as down:Q4_K:1,64; names: {known}, or these and {SMALL}"
        ) from None


def copies(device: Device, shape: Shape) -> list[Matrix]:
    """Of a matrix of random blocks, so many that L2 does not hold them."""
    import pycuda.driver as cuda

    rows = shape.outputs * (2 if shape.kind.activation else 1)
    times = REPEATED if rows > LARGE else 1
    raw = np.concatenate([weights_of(shape.format, rows // times, shape.inputs)[0]] * times)
    found = [packed(device, shape.format, raw, shape.inputs)]
    for _ in range(rounds_for(found[0].bytes) - 1):
        found.append(replace(found[0], address=device.allocate(found[0].bytes)))
        cuda.memcpy_dtod(found[-1].address, found[0].address, found[0].bytes)
    return found


def timings(
    bench: Bench, products: Products, shape: Shape, weights: Sequence[Matrix], only: str
) -> Iterator[dict[str, object]]:
    """Of all ways for so many rows."""
    device, floats = bench.device, shape.kind in (Kind.FLOAT, *SUMMED)
    x = bench.random(shape.rows, shape.inputs, scale=1 / 64)
    y = room(device, (shape.rows, shape.outputs), FLOAT if floats else ELEMENT)
    expected: npt.NDArray[np.uint8] | None = None
    for candidate in products._candidates(shape):
        if expected is not None and only not in candidate.name:
            continue
        way = candidate.kernel(shape)
        device.fill(y.address, 0, y.bytes)
        way(x, weights[0], y)
        found = device.download(y.address, (y.bytes,), np.uint8)
        expected = found if expected is None else expected

        def launch(turn: int, way=way) -> None:  # type: ignore[no-untyped-def]
            way(x, weights[turn % len(weights)], y)

        seconds = bench.seconds(launch, len(weights))
        same = bool((found == expected).all())
        yield {"way": candidate.name, "us": round(seconds * 1e6, 1), "same": same}
    for one in (x, y):
        device.free(one.address)


def main() -> None:
    """Measure what the command line names."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("products", nargs="+", type=shape_of, metavar="NAME:TYPE:ROWS")
    arguments.add_argument("--only", default="", help="the first, and ways whose names have this in them")
    options = arguments.parse_args()
    pairs = sorted({(shape.kind, shape.format) for _, shape, _ in options.products}, key=str)
    most = max(padded_rows(rows) for _, _, each in options.products for rows in each)
    with Device(0, pretended=pretended_card()) as device:
        files = PackedTiles.files(pairs) + PackedFew.files(pairs) if device.hopper else []
        compile_all((for_element(file, device.element, device.kv) for file in files), device.architecture)
        widest = max(shape.outputs for _, shape, _ in options.products)
        gate_up: Buffer = room(device, (most, 2 * widest), ELEMENT)
        products = products_with(device, gate_up, packed=pairs)
        bench = Bench(device)
        for name, shape, each in options.products:
            weights = copies(device, shape)
            for rows in each:
                padded = replace(shape, rows=padded_rows(rows))
                for line in timings(bench, products, padded, weights, options.only):
                    print(
                        json.dumps({"product": name, "type": shape.format.name, "rows": rows} | line),
                        flush=True,
                    )
            for matrix in weights:
                device.free(matrix.address)
        products.close()


if __name__ == "__main__":
    main()
