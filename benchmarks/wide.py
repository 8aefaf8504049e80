"""Attention with wide rows on a GPU: latents as of GLM-4.7-Flash and DeepSeek V2 Lite, and heads of 512.

    python -m benchmarks.wide

One JSON line a kernel and size, measured as in `benchmarks.kernels`: microseconds, and the least bytes that
have to move or FLOPs a second. Takes under a minute.
"""

# ruff: noqa: B023 - a case is measured before the loop that made its closure goes on

import argparse
import json
from collections.abc import Iterator

import numpy as np

from benchmarks.kernels import Bench, Case, Context, attention_cases, rounds_for
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import LatentAttention, Norm
from nightmill.worker.runners.gpu.attention.latent import latent_decode, latent_prefill
from nightmill.worker.runners.gpu.attention.latent_rows import HeadProducts
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.kv_cache import PAGE, LayerCache
from nightmill.worker.runners.gpu.weights.layout import HeadMatrices
from tests.support.operands import inputs_of, shape_of
from tests.support.specs import dense_spec

_ROPE = Rope(style=RopeStyle.PAIRS, dim=64, base=1e6)
GLM = LatentAttention(
    heads=20,
    key_dim=192,
    value_dim=256,
    latent=512,
    query_latent=768,
    norm=Norm(1e-5),
    scale=0.06,
    rope=_ROPE,
)
LITE = LatentAttention(
    heads=16, key_dim=128, value_dim=128, latent=512, norm=Norm(1e-5), scale=0.07, rope=_ROPE
)
WIDE = dense_spec(name="heads of 512", heads=16, kv_heads=2, head_dim=512)
DECODE: list[tuple[int, Context]] = [
    (1, 384), (1, 32_000), (8, 2048), (64, 768), (256, 768), (256, (100, 2000)), (1024, 512),
]  # fmt: skip
PREFILL = [(16, 1024), (2, 8192)]
CACHE = 2 << 30  # bytes


def latent_cases(bench: Bench, name: str, attention: LatentAttention) -> Iterator[Case]:
    """Decode, prefill, and the products of heads before and after them."""
    heads, kept, latent = attention.heads, attention.kept, attention.latent
    decode = latent_decode(bench.device, attention, max_context=32_768)
    prefill = latent_prefill(bench.device, attention)
    pages = CACHE // (2 * PAGE * kept)
    both = bench.pages(pages, 1, kept)
    cache = LayerCache(both, both)
    for count, context in DECODE:
        low, high = context if isinstance(context, tuple) else (context, context + 1)
        lengths = bench.rng.integers(low, high, count).astype(np.int32)
        needed = -(-lengths // PAGE)
        stride, size = int(needed.max()), int(lengths.sum()) * kept * 2
        if needed.sum() > pages:
            continue
        rounds = min(rounds_for(size), pages // int(needed.sum()))
        cut = decode.pieces(lengths, np.arange(count, dtype=np.int32))
        steps = []
        for _ in range(rounds):
            tables = bench.rng.integers(0, pages, (count, stride)).astype(np.int32)
            steps.append(
                inputs_of(
                    bench.device, table_width=stride, page_tables=tables, context_lengths=lengths, pieces=cut
                )
            )
        shape = shape_of(tokens=count, drawn=count, pieces=len(cut))
        queries, out = bench.random(count, heads * kept), bench.random(count, heads * latent)
        yield Case(
            "latent decode", f"{name} {count}x{context}",
            lambda i: decode(queries, cache, steps[i], shape, out), rounds,
            size + 2 * count * heads * (kept + latent),
        )  # fmt: skip
    for count, length in PREFILL:
        starts = np.arange(count + 1, dtype=np.int32) * length
        contexts, need = np.full(count, length, dtype=np.int32), -(-length // PAGE)
        tables = bench.rng.permutation(pages)[: count * need].astype(np.int32).reshape(count, need)
        tiles, _ = prefill.stage(0, tables, starts, contexts, 0)
        step = inputs_of(
            bench.device, table_width=need, sequence_starts=starts, context_lengths=contexts, tiles=tiles,
            page_tables=tables,
        )  # fmt: skip
        rows = count * length
        shape = shape_of(tokens=rows, tiles=len(tiles))
        queries, out = bench.random(rows, heads * kept), bench.random(rows, heads * latent)
        flops = 2 * (kept + latent) * heads * count * length * (length + 1) // 2
        yield Case(
            "latent prefill", f"{name} {count}x{length}",
            lambda i: prefill(queries, cache, step, shape, out), 1, 0, flops,
        )  # fmt: skip
    products = HeadProducts(bench.device, heads)
    for what, outputs, inputs in (
        ("keys", latent, attention.key_dim), ("values", attention.value_dim, latent),
    ):  # fmt: skip
        size = 2 * heads * outputs * inputs
        weights = [
            HeadMatrices(bench.random(heads, outputs, inputs).address, outputs * inputs, outputs, inputs)
            for _ in range(rounds_for(size))
        ]
        for rows in (1, 64, 256, 8192):
            x, y = bench.random(rows, heads * inputs), bench.random(rows, heads * outputs)
            few = rows < 8192
            yield Case(
                f"product of {what}", f"{name} {rows}", lambda i: products(x, weights[i], y, rows),
                len(weights), size + 2 * rows * heads * (inputs + outputs), 0 if few else rows * size,
            )  # fmt: skip


def main() -> None:
    """Measure all."""
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args()
    copy = 0.0
    for name in ("GLM-4.7-Flash", "DeepSeek V2 Lite", WIDE.name):
        with Device(0) as device:
            bench = Bench(device)
            if not copy:
                copy = bench.copy_rate()
                print(json.dumps({"gpu": device.name, "copy_gb_s": round(copy / 1e9)}), flush=True)
            if name == WIDE.name:
                cases = attention_cases(bench, WIDE, [(1, 2048), (64, 2048)], PREFILL, cache_bytes=512 << 20)
            else:
                cases = latent_cases(bench, name, GLM if name.startswith("GLM") else LITE)
            for case in cases:
                print(json.dumps(bench.measure(case, copy)), flush=True)


if __name__ == "__main__":
    main()
