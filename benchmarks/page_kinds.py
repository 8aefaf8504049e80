"""How many sequences a KV cache holds whose pages are of kinds, and go once a window has left them.

    python -m benchmarks.page_kinds
    python -m benchmarks.page_kinds --cards

Computes, and measures nothing: the bytes that a sequence keeps of models with windows, in 16 bits, as the
layout of pages has it; before, every layer kept all tokens. With --cards what models in the sizes of Gemma 4
take of cards, as a worker plans its memory. Takes a second.
"""

import argparse
from dataclasses import dataclass

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.forecast import CARDS, forecast
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    NO_FEED_FORWARD,
    Attention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    Norm,
)
from nightmill.worker.runners.gpu.device.device import DeviceMemoryError
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.page_layout import page_layout
from tests.support.gemma4_shapes import GEMMA4_SHAPES
from tests.support.quantised_models import quantised

PAGE = 16
LENGTHS = (1024, 8192, 32_768)
CACHE, GIB = 40 << 30, 1 << 30
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


def show_cards() -> None:
    """Print what Gemma 4 takes of cards, in Q4_K_M."""
    print("| model | card | weights | workspace | sequences of 1,024 tokens | of 8,192 |")
    print("| --- | --- | --- | --- | --- | --- |")
    precision = Precision(Element.BF16, WeightsFormat.AUTO)
    for name, shape in GEMMA4_SHAPES.items():
        for card in CARDS:
            try:
                found = forecast(quantised(shape.spec), card, Settings(context=8192), precision)
            except DeviceMemoryError:
                print(f"| {name} | {card.name} | does not fit | | | |")
                continue
            kept, room = WeightsFormat(found.weights_in).words, found.sequences
            print(
                f"| {name} | {card.name} | {found.weights / GIB:.1f} GiB {kept} | "
                f"{found.workspace / GIB:.1f} GiB | {room[1024]:,} | {room[8192]:,} |"
            )


def main() -> None:
    """Print the table."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--cards", action="store_true", help="what Gemma 4 takes of cards")
    if parser.parse_args().cards:
        show_cards()
        return
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
