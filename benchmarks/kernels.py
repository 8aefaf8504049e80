"""Times the kernels on the GPU, one JSON line per kernel and size: `python benchmarks/kernels.py [name ...]`.

Launches are captured in a CUDA graph, which is replayed between two events; successive launches go round
through buffers larger than L2 together. `bytes` is the least that has to move (each input once, each output
once), and `of_copy` its rate against that of a device-to-device copy measured first; attention over long
chunks is given in TFLOP/s. Data is random. The sizes are those of Qwen2.5-0.5B (14 query heads, 2 KV heads,
head size 64) and of 7B.
"""

# ruff: noqa: B023 - a case is measured before the loop that made its closure goes on

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Device
from nightmill.worker.runners.gpu.graphs import Graph
from nightmill.worker.runners.gpu.kernels import Kernels
from tests.specs import dense_spec

SMALL = dense_spec(name="0.5B", vocab=151_936)
LARGE = dense_spec(name="7B", width=3584, heads=28, kv_heads=4, head_dim=128, ffn_width=18_944, vocab=151_936)
ROUND = 192 << 20  # bytes that a round through the buffers takes at least: three times an H200's L2
REPLAYS = 5


@dataclass
class Case:
    """`launch(i)` queues the kernel on the i-th of `rounds` sets of buffers."""

    name: str
    size: str
    launch: Callable[[int], None]
    rounds: int
    bytes: int
    flops: int = 0


class Bench:
    """Buffers of random numbers, and the clock."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.rng = np.random.default_rng(0)
        self._noise = self.rng.standard_normal(1 << 24)

    def random(self, count: int, dtype: type = np.float16, scale: float = 1.0) -> int:
        return self.device.upload(np.resize((self._noise * scale).astype(dtype), count))

    def ints(self, values: np.ndarray) -> int:
        return self.device.upload(values.astype(np.int32))

    def seconds(self, launch: Callable[[int], None], rounds: int) -> float:
        """Of one launch: the median of replays of a graph that goes through all rounds."""
        device = self.device
        launches = max(rounds, 10)
        graph = Graph(device, lambda: [launch(i % rounds) for i in range(launches)] and None)
        begin, end = device.event(timing=True), device.event(timing=True)
        times = []
        for replay in range(REPLAYS + 2):
            begin.record(device.stream)
            graph.launch()
            end.record(device.stream)
            end.synchronize()
            if replay >= 2:
                times.append(end.time_since(begin) * 1e-3 / launches)
        graph.close()
        return float(np.median(times))

    def copy_rate(self) -> float:
        """Bytes read and written per second by a device-to-device copy."""
        import pycuda.driver as cuda

        size = 2 << 30
        source, target = self.device.allocate(size), self.device.allocate(size)
        self.device.fill(source, 0x5A, size)
        stream = self.device.stream
        begin, end = self.device.event(timing=True), self.device.event(timing=True)
        for copies in (3, 20):  # not in a graph, where copies go another, slower way; the first few warm up
            begin.record(stream)
            for _ in range(copies):
                cuda.memcpy_dtod_async(target, source, size, stream)
            end.record(stream)
            end.synchronize()
        rate = 20 * 2 * size / (end.time_since(begin) * 1e-3)
        self.device.free(source)
        self.device.free(target)
        return rate


def rounds_for(size: int) -> int:
    """How many sets of buffers of `size` bytes make a round."""
    return min(-(-ROUND // size), 40)


def row_cases(bench: Bench, spec: ModelSpec) -> Iterator[Case]:
    """Embedding, norms, SwiGLU, rotation."""
    kernels = Kernels(bench.device, spec, max_context=4096)
    layer = spec.layers[0]
    attention, ffn = layer.attention, layer.feed_forward.width
    width, eps = spec.width, layer.attention_norm.eps
    kernels.set_rope(attention.rope.frequencies(), attention.rope.magnitude)
    table = bench.random(spec.vocab * width)
    gains = bench.random(width, np.float32)
    heads = attention.heads + 2 * attention.kv_heads
    bias = bench.random(heads * attention.head_dim, np.float32)
    for count in (1, 256, 8192):
        rounds = rounds_for(count * width * 6)
        x = [bench.random(count * width, np.float32) for _ in range(rounds)]
        out = [bench.random(count * width) for _ in range(rounds)]
        tokens = [bench.ints(bench.rng.integers(0, spec.vocab, count)) for _ in range(rounds)]
        values = count * width
        yield Case(
            "embed",
            f"{count}x{width}",
            lambda i: kernels.embed(tokens[i], table, x[i], count),
            rounds,
            values * 6,
        )
        yield Case(
            "rms_norm",
            f"{count}x{width}",
            lambda i: kernels.rms_norm(x[i], gains, out[i], count, width, eps),
            rounds,
            values * 6,
        )
        rounds = rounds_for(count * ffn * 6)
        gate_up = [bench.random(2 * count * ffn) for _ in range(rounds)]
        acted = [bench.random(count * ffn) for _ in range(rounds)]
        yield Case(
            "swiglu",
            f"{count}x{ffn}",
            lambda i: kernels.swiglu(gate_up[i], acted[i], count, ffn),
            rounds,
            count * ffn * 6,
        )
        values = count * heads * attention.head_dim
        rounds = rounds_for(values * 4)
        qkv = [bench.random(values) for _ in range(rounds)]
        caches = [
            bench.random(-(-count // 16) * 16 * attention.kv_heads * attention.head_dim)
            for _ in range(2 * rounds)
        ]
        positions, rows = bench.ints(np.arange(count) % 4096), bench.ints(np.arange(count))
        yield Case(
            "qkv_rope_write",
            f"{count}x{heads}x{attention.head_dim}",
            lambda i: kernels.qkv_rope_write(
                qkv[i], bias, 0, 0, positions, rows, caches[2 * i], caches[2 * i + 1], count
            ),
            rounds,
            values * 4,
        )


def attention_cases(bench: Bench, spec: ModelSpec) -> Iterator[Case]:
    """Decode over contexts of one length and of many, prefill of whole prompts."""
    attention = spec.layers[0].attention
    heads, kv_heads, head = attention.heads, attention.kv_heads, attention.head_dim
    kernels = Kernels(bench.device, spec, max_context=32_768)
    pages = (2 << 30) // (kv_heads * 16 * head * 2)
    caches = [bench.random(pages * kv_heads * 16 * head) for _ in range(2)]
    decode: list[tuple[int, int | tuple[int, int]]] = [
        (1, 512),
        (1, 32_000),
        (8, 2048),
        (64, 512),
        (256, 512),
        (256, (100, 2000)),
        (1024, 512),
        (4096, 384),
    ]
    for count, context in decode:
        low, high = context if isinstance(context, tuple) else (context, context + 1)
        lengths = bench.rng.integers(low, high, count)
        needed = -(-lengths // 16)
        if needed.sum() > pages:
            continue
        total = int(lengths.sum())
        rounds = min(rounds_for(total * kv_heads * head * 4), pages // int(needed.sum()))
        stride = 2048 if count < 64 else int(needed.max())
        tables = []
        order = bench.rng.permutation(pages)
        for i in range(rounds):
            table = np.full((count, stride), -1)
            mine = order[i * needed.sum() : (i + 1) * needed.sum()]
            for row, (end, held) in enumerate(zip(np.cumsum(needed), needed, strict=True)):
                table[row, :held] = mine[end - held : end]
            tables.append(bench.ints(table))
        contexts = bench.ints(lengths)
        cut = kernels.decode_pieces(lengths.astype(np.int32), np.arange(count, dtype=np.int32))
        pieces, piece_count = (bench.ints(cut), len(cut)) if len(cut) else (0, 0)
        qkv = bench.random(count * (heads + 2 * kv_heads) * head)
        out = bench.random(count * heads * head)
        yield Case(
            "decode_attention",
            f"{spec.name} {count}x{context}",
            lambda i: kernels.decode_attention(
                qkv, *caches, tables[i], contexts, out, count, stride, 0, 0, pieces, piece_count
            ),
            rounds,
            total * kv_heads * head * 4 + count * heads * head * 4,
        )
    for count, length in ((16, 512), (16, 1024), (2, 8192), (1, 32_000)):
        starts = np.arange(count + 1) * length
        tiles = kernels.prefill_tiles(starts.astype(np.int32))
        rows = count * length
        need = -(-length // 16)
        tables, contexts = (
            bench.ints(bench.rng.permutation(pages)[: count * need]),
            bench.ints(np.full(count, length)),
        )
        qkv = bench.random(count * length * (heads + 2 * kv_heads) * head)
        out = bench.random(count * length * heads * head)
        where, pieces = bench.ints(starts), bench.ints(tiles)
        yield Case(
            "prefill_attention",
            f"{spec.name} {count}x{length}",
            lambda i: kernels.prefill_attention(
                qkv, *caches, tables, where, contexts, out, pieces, len(tiles), need, rows=rows, pages=pages
            ),
            1,
            0,
            4 * head * heads * count * length * (length + 1) // 2,
        )


def sampling_cases(bench: Bench, spec: ModelSpec) -> Iterator[Case]:
    """Greedy, temperature and filters."""
    kernels = Kernels(bench.device, spec, max_context=64)
    vocab = spec.vocab
    words = -(-vocab // 32)
    for count in (1, 64, 512):
        rounds = rounds_for(count * vocab * 4)
        logits = [bench.random(count * vocab, np.float32, 3.0) for _ in range(rounds)]
        numbers, out = bench.ints(np.arange(count)), bench.ints(np.zeros(count))
        seen = bench.ints(np.zeros(count * words))
        seeds = bench.device.upload(bench.rng.integers(0, 1 << 63, count, dtype=np.uint64))
        settings = {
            "greedy": (0.0, 0, 1.0, 0.0),
            "temperature 0.6": (0.6, 0, 1.0, 0.0),
            "min_p 0.05": (0.6, 0, 1.0, 0.05),
            "top_k 50": (0.6, 50, 1.0, 0.0),
            "top_p 0.95": (0.6, 0, 0.95, 0.0),
            "top_k 50 top_p 0.95": (0.6, 50, 0.95, 0.0),
        }
        for name, (temperature, top_k, top_p, min_p) in settings.items():

            def full(value: float) -> int:
                return bench.device.upload(np.full(count, value, dtype=np.float32))

            slots = SimpleNamespace(
                temperature=full(temperature),
                top_k=bench.ints(np.full(count, top_k)),
                top_p=full(top_p),
                min_p=full(min_p),
                penalty=full(1.0),
                seeds=seeds,
                last_token=bench.ints(np.zeros(count)),
                seen=seen,
                words=words,
            )
            yield Case(
                "sample",
                f"{count}x{vocab} {name}",
                lambda i: kernels.sample(logits[i], count, numbers, numbers, numbers, slots, out),
                rounds,
                count * vocab * 4,
            )


def main() -> None:
    """Measure the kernels named on the command line, or all."""
    wanted = sys.argv[1:]
    groups: list[tuple[Callable[[Bench, ModelSpec], Iterator[Case]], ModelSpec]] = [
        (row_cases, SMALL),
        (attention_cases, SMALL),
        (attention_cases, LARGE),
        (sampling_cases, SMALL),
    ]
    copy = 0.0
    for group, spec in groups:
        with Device(0) as device:
            bench = Bench(device)
            if not copy:
                copy = bench.copy_rate()
                print(json.dumps({"gpu": device.name, "copy_gb_s": round(copy / 1e9)}), flush=True)
            for case in itertools.filterfalse(lambda c: wanted and c.name not in wanted, group(bench, spec)):
                seconds = bench.seconds(case.launch, case.rounds)
                line = {"kernel": case.name, "size": case.size, "us": round(seconds * 1e6, 2)}
                if case.flops:
                    line["tflop_s"] = round(case.flops / seconds / 1e12, 1)
                else:
                    rate = case.bytes / seconds
                    line |= {"bytes": case.bytes, "gb_s": round(rate / 1e9), "of_copy": round(rate / copy, 3)}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
