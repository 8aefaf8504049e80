"""How many sequences a KV cache holds whose pages are of kinds, and go once a window has left them.

    python -m benchmarks.page_kinds

Computes, and measures nothing: the bytes that a sequence keeps of models with windows, in 16 bits, as the
layout of pages has it; before, every layer kept all tokens. Takes a second.
"""

import argparse
from dataclasses import dataclass

from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    NO_FEED_FORWARD,
    Attention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    Norm,
)
from nightmill.worker.runners.page_layout import page_layout

PAGE = 16
LENGTHS = (1024, 8192, 32_768)
CACHE = 40 << 30
NORM = Norm(1e-6)


@dataclass(frozen=True)
class Layers:
    """So many layers with KV heads of this size, and a window or none; `period`: one of so many is such."""

    count: int
    kv_heads: int
    head_dim: int
    window: int | None = None


MODELS: dict[str, tuple[Layers, ...]] = {
    "Gemma 2 9B": (Layers(21, 8, 256, 4096), Layers(21, 8, 256)),
    "Gemma 3 4B": (Layers(29, 4, 256, 1024), Layers(5, 4, 256)),
    "Gemma 3 27B": (Layers(52, 16, 128, 1024), Layers(10, 16, 128)),
    "gpt-oss-20b": (Layers(12, 8, 64, 128), Layers(12, 8, 64)),
    "Gemma 4 E2B": (Layers(12, 1, 256, 512), Layers(3, 1, 512)),
    "Gemma 4 26B-A4B": (Layers(25, 8, 256, 1024), Layers(5, 2, 512)),
    "Phi-3 mini 4k": (Layers(32, 32, 96, 2047),),
}
"""Those layers that keep keys and values of their own."""


def spec_of(name: str, layers: tuple[Layers, ...]) -> ModelSpec:
    """A model with these layers, as far as its cache goes."""
    rope = Rope(style=RopeStyle.HALVES, dim=64, base=10_000.0)
    return ModelSpec(
        family="gemma3", name=name, width=64, vocab=256, context_length=131_072, output_norm=NORM,
        tied_head=True,
        layers=tuple(
            LayerSpec(
                attention_norm=NORM,
                mixer=Attention(
                    heads=one.kv_heads, kv_heads=one.kv_heads, head_dim=one.head_dim, rope=rope,
                    window=one.window,
                ),
                feed_forward_norm=None,
                feed_forward=NO_FEED_FORWARD,
            )
            for one in layers
            for _ in range(one.count)
        ),
    )  # fmt: skip


def numbers(mixer: Attention | LatentAttention) -> int:
    """Numbers of a layer's keys in a part of a page."""
    return PAGE * mixer.keys


def main() -> None:
    """Print the table."""
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args()
    print(f"| model | tokens | KiB a sequence | before | times | sequences in {CACHE >> 30} GiB | before |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, layers in MODELS.items():
        spec = spec_of(name, layers)
        layout = page_layout(spec, PAGE, numbers)
        for length in LENGTHS:
            kept = layout.pages_at(length) * layout.numbers * 2
            before = -(-length // PAGE) * PAGE * 2 * 2 * spec.keys
            print(
                f"| {name} | {length:,} | {kept >> 10:,} | {before >> 10:,} | {before / kept:.2f} | "
                f"{CACHE // kept:,} | {CACHE // before:,} |"
            )


if __name__ == "__main__":
    main()
