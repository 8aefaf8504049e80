"""Launches whose blocks wait inside for copies and for each other, with kernels built as the caller says.

    python -m tests.gpu.waiting NAME [NAME ...] [-DOPTION ...]

Writes a line for each: the name, and a digest of the results of all its kernels; or what error there was.
A program of its own, because a kernel that traps takes the process's context with it, and one that waits for
ever ends only with the process. Names are those of LAUNCHES, and head:OUTPUTSxINPUTSxROWS, a product with a
head in Q8_0 by every relay that takes it.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from nightmill.jobs.errors import RunnerError
from nightmill.worker.runners.gpu.attention.choice import decode_attention, prefill_attention
from nightmill.worker.runners.gpu.attention.latent import latent_prefill
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.products.elements import hopper_gemm, hopper_split
from nightmill.worker.runners.gpu.products.fp8 import hopper_fp8
from nightmill.worker.runners.gpu.products.packed import packed_gemm
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedTile, PackedTiles
from nightmill.worker.runners.gpu.shapes import Candidate, Kind, Shape
from tests.gpu.attending import run_prefill, run_split
from tests.gpu.latents import make_absorbed, make_latents, run_latent_prefill
from tests.gpu.oracles import attention_of, make_paged, make_queries
from tests.gpu.test_fp8 import Rows
from tests.support.cuda_runners import pretended_card
from tests.support.operands import elements, fetched, fp8_room, matrix, poisoned
from tests.support.packed_weights import packed, weights_of
from tests.support.parts import latent_of

RELAYS = tuple(tile for tile in packed_gemm.PACKED_TILES[Kind.FLOAT] if tile.relay)
TILES = tuple(tile for tile in packed_gemm.PACKED_TILES[Kind.FLOAT] if not tile.relay)
SEED = 7

Results = Iterable[bytes]


def head(device: Device, outputs: int, inputs: int, rows: int, tiles: Sequence[PackedTile]) -> Results:
    """What tiles give for so many rows of logits; with the kernels of these tiles alone."""
    tiles = [tile for tile in tiles if rows <= tile.rows < max(9, 4 * rows) and tile.takes(inputs)]
    packed_gemm.PACKED_TILES[Kind.FLOAT] = tuple(tiles)
    launcher = PackedTiles(device, [(Kind.FLOAT, Format.Q8_0)])
    x, weight = operands(device, outputs, inputs, rows)
    shape = Shape(rows, outputs, inputs, Kind.FLOAT, Format.Q8_0)
    return [result(device, launcher.kernel(tile, shape), shape, x, weight) for tile in tiles]


def operands(device: Device, outputs: int, inputs: int, rows: int) -> tuple[Buffer, Matrix]:
    raw, _ = weights_of(Format.Q8_0, outputs, inputs)
    values = np.random.default_rng(SEED).standard_normal((rows, inputs)) / 64
    return elements(device, values), packed(device, Format.Q8_0, raw, inputs)


def result(
    device: Device, way: Callable[[Buffer, Matrix, Buffer], None], shape: Shape, x: Buffer, weight: Matrix
) -> bytes:
    y = poisoned(device, (shape.rows, shape.outputs), FLOAT if shape.kind is Kind.FLOAT else ELEMENT)
    way(x, weight, y)
    return fetched(device, y).tobytes()


def few(device: Device) -> Results:
    shape = Shape(3, 1152, 896, Kind.PLAIN, Format.Q8_0)
    x, weight = operands(device, shape.outputs, shape.inputs, shape.rows)
    launcher = PackedFew(device, [(Kind.PLAIN, Format.Q8_0)])
    return by_all(device, launcher.candidates(shape), shape, x, weight)


def by_all(
    device: Device, candidates: Sequence[Candidate], shape: Shape, x: Buffer, weight: Matrix
) -> list[bytes]:
    assert candidates
    return [result(device, one.kernel(shape), shape, x, weight) for one in candidates]


def gemm(device: Device) -> Results:
    shape = Shape(200, 1152, 2048, Kind.PLAIN)
    hopper_gemm.TILES[Kind.PLAIN] = hopper_gemm.TILES[Kind.PLAIN][::3]
    rng = np.random.default_rng(SEED)
    x = elements(device, rng.standard_normal((shape.rows, shape.inputs)) / 64)
    weight = matrix(device, rng.standard_normal((shape.outputs, shape.inputs)))
    return by_all(device, hopper_gemm.HopperTiles(device, [Kind.PLAIN]).candidates(shape), shape, x, weight)


def halves(device: Device) -> Results:
    """Blocks of a cluster that share a long K, and hand each other sums."""
    shape = Shape(64, 896, 4864, Kind.ADDEND)
    rng = np.random.default_rng(SEED)
    x = elements(device, rng.standard_normal((shape.rows, shape.inputs)) / 64)
    weight = matrix(device, rng.standard_normal((shape.outputs, shape.inputs)))
    found = []
    for candidate in hopper_split.SplitTiles(device, [Kind.ADDEND]).candidates(shape):
        y = poisoned(device, (shape.rows, shape.outputs), FLOAT)
        candidate.kernel(shape)(x, weight, y)
        found.append(fetched(device, y).tobytes())
    return found


def fp8(device: Device) -> Results:
    tiles = hopper_fp8.FP8_TILES[Kind.PLAIN][::2]
    hopper_fp8.FP8_TILES[Kind.PLAIN] = tiles
    rng = np.random.default_rng(SEED)
    rows, outputs, inputs = 130, 1152, 4352
    x, weight = Rows(device, rows, inputs, rng), Rows(device, outputs, inputs, rng)
    products = hopper_fp8.HopperFp8(device, [Kind.PLAIN], fp8_room(device, 0, 0))
    shape = Shape(rows, outputs, inputs, Kind.PLAIN, Format.FP8)
    return [result(device, products.kernel(tile, shape), shape, x.buffer, weight.matrix) for tile in tiles]


def prompts(device: Device) -> Results:
    attention, chunks = attention_of((14, 2, 64)), [1, 300, 65, 700]
    rng, lengths = np.random.default_rng(SEED), [41, 300, 165, 700]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, sum(chunks), attention, device.element)
    prefill = prefill_attention(device, attention)
    return [run_prefill(device, prefill, attention, qkv, paged, lengths, chunks).tobytes()]


def latents(device: Device) -> Results:
    """Prompts of latent attention, and of heads of 512, in which warpgroups hand weights to each other."""
    attention, chunks, lengths = latent_of(20), [300, 65, 7], [300, 165, 700]
    rng = np.random.default_rng(SEED)
    paged = make_latents(rng, device, attention, lengths)
    queries = make_absorbed(rng, device, attention, sum(chunks))
    prefill = latent_prefill(device, attention)
    yield run_latent_prefill(device, prefill, attention, queries, paged, lengths, chunks).tobytes()
    wide = attention_of((16, 2, 512))
    paged = make_paged(rng, lengths, wide.kv_heads, wide.head_dim, element=device.element)
    qkv = make_queries(rng, sum(chunks), wide, device.element)
    yield run_prefill(device, prefill_attention(device, wide), wide, qkv, paged, lengths, chunks).tobytes()


def segments(device: Device) -> Results:
    """Blocks of a cluster that each attend to a segment of a context."""
    attention = attention_of((14, 2, 64))
    rng, lengths = np.random.default_rng(SEED), [600, 17, 300]
    paged = make_paged(rng, lengths, attention.kv_heads, attention.head_dim, element=device.element)
    qkv = make_queries(rng, len(lengths), attention, device.element)
    decode = decode_attention(device, attention, max_context=max(lengths))
    return [run_split(device, decode, attention, qkv, paged, lengths).tobytes()]


LAUNCHES: dict[str, Callable[[Device], Results]] = {
    "relays": lambda device: chain.from_iterable(
        head(device, 9000, inputs, rows, RELAYS) for inputs in (576, 1088) for rows in (1, 12, 40)
    ),
    "tiles": lambda device: chain.from_iterable(
        head(device, 2056, 896, rows, TILES) for rows in (1, 40, 200)
    ),
    "few": few,
    "gemm": gemm,
    "halves": halves,
    "fp8": fp8,
    "prompts": prompts,
    "latents": latents,
    "segments": segments,
}


def run(device: Device, name: str) -> Results:
    if name.startswith("head:"):
        outputs, inputs, rows = map(int, name.removeprefix("head:").split("x"))
        return head(device, outputs, inputs, rows, RELAYS)
    return LAUNCHES[name](device)


def main() -> int:
    options = [one for one in sys.argv[1:] if one.startswith("-D")]
    compiler.COMMON_OPTIONS = (*compiler.COMMON_OPTIONS, *options)  # type: ignore[assignment]
    with Device(pretended=pretended_card()) as device:
        for name in sys.argv[1:]:
            if name in options:
                continue
            try:
                found = list(run(device, name))
            except RunnerError as error:
                sys.stdout.write(f"{type(error).__name__}: {error}\n")
                return 1
            assert found, f"no kernel computes {name}"
            digest = hashlib.sha256(b"".join(found)).hexdigest()[:16]
            sys.stdout.write(f"{name} {len(found)} {digest}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
