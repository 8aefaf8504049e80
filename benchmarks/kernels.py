"""Kernels on a GPU, each alone: microseconds and bytes or FLOPs a second, one JSON line a kernel and size.

    python -m benchmarks.kernels [embed | rms_norm | swiglu | qkv_rope_write | decode_attention |
                                  prefill_attention | sample ...]

Launches are captured in a CUDA graph, which is replayed between two events; successive launches go round
through buffers larger than L2 together. `bytes` is the least that has to move (each input once, each output
once), and `of_copy` its rate against that of a device-to-device copy measured first; attention over long
chunks is given in TFLOP/s. Data is random. Sizes are those of Qwen2.5-0.5B (14 query heads, 2 KV heads, head
size 64) and of 7B; attention is measured with heads of 80 to 256 elements, too. All take a few minutes.
"""

# ruff: noqa: B023 - a case is measured before the loop that made its closure goes on

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import make_draws
from nightmill.worker.runners.gpu.attention.choice import decode_attention, prefill_attention
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer, Matrix
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache, page_bytes
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.sampling.sampler import SLOT, Sampler
from nightmill.worker.runners.gpu.weights.layout import NormWeight
from nightmill.worker.runners.kv_format import KvFormat
from tests.support.fp8_pages import as_parts
from tests.support.operands import inputs_of, shape_of
from tests.support.specs import dense_spec

SMALL = dense_spec(name="0.5B", vocab=151_936)
LARGE = dense_spec(name="7B", width=3584, heads=28, kv_heads=4, head_dim=128, ffn_width=18_944, vocab=151_936)
ROUND = 192 << 20  # bytes that a round through the buffers takes at least: three times an H200's L2
REPLAYS = 5
Context = int | tuple[int, int]
DECODE: list[tuple[int, Context]] = [
    (1, 512), (1, 32_000), (8, 2048), (64, 512), (256, 512), (256, (100, 2000)), (1024, 512), (4096, 384),
]  # fmt: skip
HEADS = [(14, 2, 64), (12, 2, 80), (10, 2, 96), (7, 1, 128), (4, 1, 256)]
"""Queries, keys and size, with about as many elements each: 256 sequences decode, 16 prompts of 2,048."""
PREFILL = [(16, 512), (16, 1024), (2, 8192), (1, 32_000)]


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

    def random(self, *shape: int, dtype: type = np.float16, scale: float = 1.0) -> Buffer:
        values = np.resize((self._noise * scale).astype(dtype), shape)
        return Buffer(self.device.upload(values), shape, values.dtype)

    def pages(self, count: int, kv_heads: int, head_dim: int) -> Buffer:
        """Random keys or values, as the device keeps them."""
        if self.device.kv is KvFormat.ELEMENT:
            return self.random(count, kv_heads, PAGE, head_dim)
        some = np.resize(self._noise, (min(count, 1024), kv_heads, PAGE, head_dim))
        parts = as_parts(some, self.device.element)
        values = np.resize(parts, (count, *parts.shape[1:]))
        return Buffer(self.device.upload(values), values.shape, values.dtype)

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

    def measure(self, case: Case, copy: float) -> dict[str, Any]:
        """A line for a case; `copy`: `copy_rate`."""
        seconds = self.seconds(case.launch, case.rounds)
        line: dict[str, Any] = {"kernel": case.name, "size": case.size, "us": round(seconds * 1e6, 2)}
        if case.flops:
            return line | {"tflop_s": round(case.flops / seconds / 1e12, 1)}
        rate = case.bytes / seconds
        return line | {"bytes": case.bytes, "gb_s": round(rate / 1e9), "of_copy": round(rate / copy, 3)}

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
    device, layer = bench.device, spec.layers[0]
    attention, width, ffn = layer.attention, spec.width, layer.feed_forward.width
    embedding, norm, swiglu = Embedding(device, spec.vocab), Norms(device, spec), Activate(device)
    rotation = Rotation(device, attention, max_context=4096)
    table = Matrix(bench.random(spec.vocab, width).address, spec.vocab, width)
    gains = NormWeight(bench.random(width, dtype=np.float32), layer.attention_norm.eps)
    # Of a layer's weights, what rotation reads.
    biased: Any = SimpleNamespace(
        qkv_bias=bench.random(attention.qkv, dtype=np.float32), q_norm=ABSENT, k_norm=ABSENT
    )
    for count in (1, 256, 8192):
        rounds = rounds_for(count * width * 6)
        x = [bench.random(count, width, dtype=np.float32) for _ in range(rounds)]
        out = [bench.random(count, width) for _ in range(rounds)]
        tokens = [bench.ints(bench.rng.integers(0, spec.vocab, count)) for _ in range(rounds)]
        drawn = [Buffer(address, (count,), np.dtype(np.int32)) for address in tokens]
        values = count * width
        size = f"{count}x{width}"
        yield Case("embed", size, lambda i: embedding.embed(drawn[i], table, x[i], count), rounds, values * 6)
        yield Case("rms_norm", size, lambda i: norm(x[i], gains, out[i], count), rounds, values * 6)
        rounds = rounds_for(count * ffn * 6)
        gate_up = [bench.random(count, 2 * ffn) for _ in range(rounds)]
        acted = [bench.random(count, ffn) for _ in range(rounds)]
        yield Case(
            "swiglu", f"{count}x{ffn}", lambda i: swiglu(gate_up[i], acted[i], count), rounds, count * ffn * 6
        )
        values = count * attention.qkv
        rounds = rounds_for(values * 4)
        qkv = [bench.random(count, attention.qkv) for _ in range(rounds)]
        page = attention.kv_heads, PAGE, attention.head_dim
        caches = [LayerCache(*(bench.random(-(-count // PAGE), *page) for _ in "kv")) for _ in range(rounds)]
        positions, rows = bench.ints(np.arange(count) % 4096), bench.ints(np.arange(count))
        yield Case(
            "qkv_rope_write",
            f"{count}x{attention.qkv // attention.head_dim}x{attention.head_dim}",
            lambda i: rotation(qkv[i], biased, positions, rows, caches[i], count),
            rounds,
            values * 4,
        )


def attention_cases(
    bench: Bench, spec: ModelSpec, decode: Sequence[tuple[int, Context]] = DECODE,
    prefill: Sequence[tuple[int, int]] = PREFILL, cache_bytes: int = 2 << 30,
) -> Iterator[Case]:  # fmt: skip
    """Decode of so many sequences over contexts of one length or of many, prefill of so many prompts.

    cache_bytes  of keys, and of values
    """
    attention = spec.layers[0].attention
    heads, kv_heads, head = attention.heads, attention.kv_heads, attention.head_dim
    decode_all = decode_attention(bench.device, attention, max_context=32_768)
    prefill_all = prefill_attention(bench.device, attention)
    token = page_bytes(replace(spec, layers=spec.layers[:1]), bench.device.kv) // PAGE  # bytes
    pages = 2 * cache_bytes // (PAGE * token)
    cache = LayerCache(*(bench.pages(pages, kv_heads, head) for _ in "kv"))
    for count, context in decode:
        low, high = context if isinstance(context, tuple) else (context, context + 1)
        lengths = bench.rng.integers(low, high, count)
        needed = -(-lengths // 16)
        if needed.sum() > pages:
            continue
        total = int(lengths.sum())
        rounds = min(rounds_for(total * token), pages // int(needed.sum()))
        stride = 2048 if count < 64 else int(needed.max())
        tables = []
        order = bench.rng.permutation(pages)
        for i in range(rounds):
            table = np.full((count, stride), -1)
            mine = order[i * needed.sum() : (i + 1) * needed.sum()]
            for row, (end, held) in enumerate(zip(np.cumsum(needed), needed, strict=True)):
                table[row, :held] = mine[end - held : end]
            tables.append(table.astype(np.int32))
        contexts = lengths.astype(np.int32)
        cut = decode_all.pieces(contexts, np.arange(count, dtype=np.int32))
        steps = [
            inputs_of(
                bench.device, table_width=stride, page_tables=table, context_lengths=contexts, pieces=cut
            )
            for table in tables
        ]
        shape = shape_of(tokens=count, drawn=count, pieces=len(cut))
        qkv, out = bench.random(count, attention.qkv), bench.random(count, attention.queries)
        yield Case(
            "decode_attention",
            f"{spec.name} {count}x{context}",
            lambda i: decode_all(qkv, cache, steps[i], shape, out),
            rounds,
            total * token + count * heads * head * 4,
        )
    for count, length in prefill:
        starts = np.arange(count + 1, dtype=np.int32) * length
        contexts = np.full(count, length, dtype=np.int32)
        rows, need = count * length, -(-length // PAGE)
        tables = bench.rng.permutation(pages)[: count * need].astype(np.int32).reshape(count, need)
        prefill_all.reserve(slots=count, max_context=length, max_tokens=rows, depth=1)
        tiles, groups = prefill_all.stage(0, tables, starts, contexts, 0)
        step = inputs_of(
            bench.device, table_width=need, sequence_starts=starts, context_lengths=contexts, tiles=tiles,
            page_tables=tables,
        )  # fmt: skip
        shape = shape_of(tokens=rows, tiles=len(tiles), groups=groups)
        qkv, out = bench.random(rows, attention.qkv), bench.random(rows, attention.queries)
        yield Case(
            "prefill_attention",
            f"{spec.name} {count}x{length}",
            lambda i: prefill_all(qkv, cache, step, shape, out),
            1,
            0,
            4 * head * heads * count * length * (length + 1) // 2,
        )


def heads_cases(bench: Bench, spec: ModelSpec) -> Iterator[Case]:
    """Attention of one size, by which heads of different sizes are compared."""
    return attention_cases(bench, spec, [(256, 2048)], [(16, 2048)], cache_bytes=512 << 20)


def sampling_cases(bench: Bench, spec: ModelSpec) -> Iterator[Case]:
    """Greedy, temperature and filters."""
    vocab = spec.vocab
    sampler = Sampler(bench.device, vocab, max_rows=512)
    for count in (1, 64, 512):
        rounds = rounds_for(count * vocab * 4)
        logits = [bench.random(count, vocab, dtype=np.float32, scale=3.0) for _ in range(rounds)]
        everyone, out = np.arange(count, dtype=np.int32), bench.random(count, dtype=np.int32)
        draws = bench.device.upload(make_draws(everyone, everyone, everyone))
        settings = {
            "greedy": (0.0, 0, 1.0, 0.0),
            "temperature 0.6": (0.6, 0, 1.0, 0.0),
            "min_p 0.05": (0.6, 0, 1.0, 0.05),
            "top_k 50": (0.6, 50, 1.0, 0.0),
            "top_p 0.95": (0.6, 0, 0.95, 0.0),
            "top_k 50 top_p 0.95": (0.6, 50, 0.95, 0.0),
        }
        for name, values in settings.items():
            table = np.zeros(count, dtype=SLOT)
            table["seed"] = bench.rng.integers(0, 1 << 63, count, dtype=np.uint64)
            for field, value in zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True):
                table[field] = value
            slots = bench.device.upload(table)
            yield Case(
                "sample",
                f"{count}x{vocab} {name}",
                lambda i: sampler.sample(logits[i], count, draws, slots, out),
                rounds,
                count * vocab * 4,
            )


def main() -> None:
    """Measure the kernels named on the command line, or all."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("kernels", nargs="*", metavar="KERNEL")
    wanted = arguments.parse_args().kernels
    groups: list[tuple[Callable[[Bench, ModelSpec], Iterator[Case]], ModelSpec]] = [
        (row_cases, SMALL),
        (attention_cases, SMALL),
        (attention_cases, LARGE),
        (sampling_cases, SMALL),
        *(
            (heads_cases, dense_spec(name=f"heads of {size}", heads=queries, kv_heads=keys, head_dim=size))
            for queries, keys, size in HEADS
        ),
    ]
    copy = 0.0
    for group, spec in groups:
        with Device(0) as device:
            bench = Bench(device)
            if not copy:
                copy = bench.copy_rate()
                print(json.dumps({"gpu": device.name, "copy_gb_s": round(copy / 1e9)}), flush=True)
            for case in itertools.filterfalse(lambda c: wanted and c.name not in wanted, group(bench, spec)):
                print(json.dumps(bench.measure(case, copy)), flush=True)


if __name__ == "__main__":
    main()
