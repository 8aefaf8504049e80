"""Tries queries, keys and values of real models in one launch on the GPU; a process, as `product_trials`.

    python -m tests.gpu.qkv_trials HEAD STYLE FORMAT[+FORMAT...] [OPTION ...]

Each tile computes them at several numbers of rows. Queries and pages must have the bits of the product over
the same packed weights, followed by the rotation; keys and values are written to the pages alone.
"""

import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.runners.gpu.device import compiler
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, FLOAT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import for_element, source_of
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.products.packed import packed_qkv
from nightmill.worker.runners.gpu.products.packed.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedTiles
from nightmill.worker.runners.gpu.products.packed.packed_qkv import PackedQkv
from nightmill.worker.runners.gpu.rows import rotation
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.shapes import Kind, Shape, padded_rows
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, LayerWeights
from nightmill.worker.runners.kv_format import KvFormat
from tests.gpu.comparing_on_gpu import SOURCE, ResultsOnGpu
from tests.gpu.product_trials import DONE, X_SCALE, say
from tests.gpu.resident import ResidentWeights
from tests.support.cuda_runners import pretended_card
from tests.support.operands import products_with
from tests.support.real_products import ROWS, RealQkv, real_qkvs

__all__ = ["group_of", "groups", "main"]

CONTEXT = 4096
MOST_ROWS = max(ROWS)


def group_of(qkv: RealQkv) -> tuple[str, str, str]:
    """Those that one file is compiled for."""
    attention = qkv.attention
    formats = "+".join(part.format for part in qkv.parts)
    return str(attention.head_dim), attention.rope.style.value, formats


def suited() -> list[RealQkv]:
    """Those that the kernels take, on a Hopper."""
    return [
        one
        for one in real_qkvs()
        if PackedQkv.suits(one.attention, _formats(one), KvFormat.ELEMENT, hopper=True)
    ]


def groups() -> list[tuple[str, str, str]]:
    """All of them."""
    return sorted({group_of(one) for one in suited()})


def main(head: str, style: str, formats: str, *options: str) -> int:
    """Try a group, with kernels compiled with these options, if any is given; 1 if anything was wrong."""
    if options:
        compiler.COMMON_OPTIONS = options
    began = time.monotonic()
    found = {}
    for one in suited():
        sizes = one.attention.heads, one.attention.kv_heads, one.attention.bias, one.width, one.parts
        if group_of(one) == (head, RopeStyle(style).value, formats):
            found.setdefault(sizes, one)
    chosen, wrong = list(found.values()), 0
    with Device(pretended=pretended_card()) as device:
        say(f"compiling for {len(chosen)} of {head} {style} {formats}")
        kept, attention = _formats(chosen[0]), chosen[0].attention
        pairs = [(Kind.PLAIN, one) for one in dict.fromkeys(kept)]
        sources = [packed_qkv._source(attention, kept), rotation._source(attention), SOURCE]
        sources += [*PackedFew.files(pairs), *PackedTiles.files(pairs), *map(source_of, ("repack", "unpack"))]
        compile_all((for_element(one, device.element, device.kv) for one in sources), device.architecture)
        trial = QkvTrial(device, kept, max(one.width for one in chosen))
        for one in chosen:
            for fault in trial.faults(one):
                say(f"WRONG: {fault}")
                wrong += 1
    seconds = time.monotonic() - began
    say(f"{DONE if not wrong else f'{wrong} wrong of'} {trial.launched} launches of {len(chosen)} layers in "
        f"{seconds:.0f} s")  # fmt: skip
    return min(wrong, 1)


class QkvTrial:
    """Tries layers whose matrices have these formats.

    launched  tiles that were tried so far, at all numbers of rows
    """

    def __init__(self, device: Device, formats: Sequence[Format], most_width: int) -> None:
        self._device = device
        self.launched = 0
        self._compared = ResultsOnGpu(device)
        self._weights = {kept: ResidentWeights(device, kept) for kept in formats}
        gate_up = Buffer(device.allocate(64), (1, 8), ELEMENT)
        pairs = [(Kind.PLAIN, kept) for kept in dict.fromkeys(formats)]
        self._products = products_with(device, gate_up, [Kind.PLAIN], packed=pairs)
        rng = np.random.default_rng(1)
        numbers = rng.integers(-127, 128, MOST_ROWS * most_width, dtype=np.int8)
        self._held = device.upload(numbers.astype(np.float16) * np.float16(X_SCALE), "activations")
        self._positions = device.upload(rng.integers(0, CONTEXT, MOST_ROWS, dtype=np.int32))
        self._places = device.upload(rng.permutation(MOST_ROWS + 4 * PAGE)[:MOST_ROWS].astype(np.int32))

    def faults(self, one: RealQkv) -> Iterator[str]:
        """What is wrong with a layer, in words."""
        device, attention, width = self._device, one.attention, one.width
        say(f"making the weights of {one}")
        parts = [self._weights[Format[part.format]].packed(part.rows, width) for part in one.parts]
        whole = Matrix(parts[0].address, attention.qkv, width, Format.MIXED, parts=tuple(parts))
        matrix = whole if len(parts) > 1 else parts[0]
        bias = np.random.default_rng(2).standard_normal(attention.qkv).astype(np.float32)
        layer = LayerWeights(
            attn_norm=NO_NORM, qkv=matrix, q_norm=ABSENT, k_norm=ABSENT, attn_output=matrix, ffn_norm=NO_NORM,
            gate_up=matrix, ffn_down=matrix,
            qkv_bias=Buffer(device.upload(bias), bias.shape, FLOAT) if attention.bias else ABSENT,
        )  # fmt: skip
        rotated = Rotation(device, attention, max_context=CONTEXT)
        fused = PackedQkv(device, attention, _formats(one), rotated.table)
        size = MOST_ROWS * attention.qkv * ELEMENT.itemsize
        page = attention.kv_heads * PAGE * attention.head_dim * ELEMENT.itemsize
        pages = (MOST_ROWS // PAGE + 4) * page
        taken = [device.allocate(size) for _ in range(3)] + [device.allocate(pages) for _ in range(4)]
        product, expected, found, *caches = taken
        shape = (MOST_ROWS // PAGE + 4, attention.kv_heads, PAGE * attention.head_dim)
        kept, own = (
            LayerCache(*(Buffer(address, shape, ELEMENT) for address in caches[first : first + 2]))
            for first in (0, 2)
        )
        plain = Shape(MOST_ROWS, attention.qkv, width, Kind.PLAIN, matrix.format)
        say(f"{one}, the product")
        x = Buffer(self._held, (MOST_ROWS, width), ELEMENT)
        results = Buffer(product, (MOST_ROWS, attention.qkv), ELEMENT)
        self._products._candidates(plain)[0].kernel(plain)(x, matrix, results)
        tiles = [tile for tile in fused.tiles if tile.takes(width)]
        for rows in ROWS:
            self._rotated(one, layer, rotated, product, expected, kept, rows)
            for tile in tiles:
                if not tile.worthwhile(padded_rows(rows)):
                    continue
                say(name := f"{one}, {rows} rows, {tile.name}")
                for address, count in ((found, size), (caches[2], pages), (caches[3], pages)):
                    device.fill(address, 0xFF, count)
                y = Buffer(found, (MOST_ROWS, attention.qkv), ELEMENT)
                fused.run(tile, x, layer, self._positions, self._places, y, own, rows)
                device.synchronize()
                self.launched += 1
                for what, ours, theirs, count in (
                    ("queries, or what is beside them", found, expected, size),
                    ("keys", caches[2], caches[0], pages),
                    ("values", caches[3], caches[1], pages),
                ):
                    other, first = self._compared.other_bits(ours, theirs, count)
                    if other:
                        yield f"{name}: {other:,} words of {what} have other bits, the first is {first:,}"
        for address in [*taken, *(part.address for part in parts)]:
            device.free(address)

    def _rotated(
        self, one: RealQkv, layer: LayerWeights, rotated: Rotation, product: int, expected: int,
        kept: LayerCache, rows: int,
    ) -> None:  # fmt: skip
        """What a launch has to give for so many rows: queries, NaN beside them, and the pages."""
        device, attention = self._device, one.attention
        row = attention.qkv * ELEMENT.itemsize
        device.fill(expected, 0xFF, MOST_ROWS * row)
        for cache in (kept.keys, kept.values):
            device.fill(cache.address, 0xFF, cache.bytes)
        self._compared.copy(expected, product, rows * row)
        y = Buffer(expected, (MOST_ROWS, attention.qkv), ELEMENT)
        rotated(y, layer, self._positions, self._places, kept, rows)
        queries = attention.queries * ELEMENT.itemsize
        device._cuda.memset_d2d8_async(expected + queries, row, 0xFF, row - queries, rows, device.stream)


def _formats(one: RealQkv) -> tuple[Format, ...]:
    return tuple(Format[part.format] for part in one.parts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
