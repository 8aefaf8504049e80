"""The models that docs/models.md names for a beginner fit as it says, by the memory plan."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.forecast import CARDS, GIB, forecast
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import Attention, FeedForward, LayerSpec, ModelSpec, Norm
from nightmill.worker.runners.gpu.kv_cache import PAGE, page_bytes
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat

ROOT = Path(__file__).parents[3]
PAGE_ON_MODELS = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (\d+ GB) \| `(\S+)` \| ([\d.]+) GB \| ([\d.]+) GiB \| ([\d,]+) tokens "
    r"\| ([\d,]+) sequences of 1,024 tokens \|$",
    PAGE_ON_MODELS,
    re.MULTILINE,
)
# Of https://huggingface.co/Qwen/Qwen2.5-...-Instruct: layers, width, heads, KV heads, width of the
# feed-forward network, vocabulary, whether the head is tied; and the parameters that they come to.
SIZES = {
    "1.5B": (28, 1536, 12, 2, 8960, 151_936, True, 1_543_714_304),
    "7B": (28, 3584, 28, 4, 18_944, 152_064, False, 7_615_616_512),
    "14B": (48, 5120, 40, 8, 13_824, 152_064, False, 14_770_033_664),
}
AUTO = Precision(weights=WeightsFormat.AUTO)
BYTES_OF_Q8_0 = 34 / 32  # a number


def qwen(size: str) -> ModelSpec:
    layers, width, heads, kv_heads, ffn, vocab, tied, _ = SIZES[size]
    norm, rope = Norm(1e-6), Rope(dim=128, base=1e6, style=RopeStyle.HALVES)
    layer = LayerSpec(
        attention_norm=norm,
        mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=128, rope=rope, bias=True),
        feed_forward_norm=norm,
        feed_forward=FeedForward(width=ffn),
    )
    return ModelSpec(
        family="qwen2", name=size, width=width, vocab=vocab, context_length=32_768,
        layers=(layer,) * layers, output_norm=norm, tied_head=tied,
    )  # fmt: skip


def in_q8_0(size: str) -> ModelSpec:
    """As a worker without options opens it."""
    spec = qwen(size)
    types = {name: "Q8_0" for _, weight in spec.all_weights() if weight.is_matrix for name in weight.names}
    return replace(spec, tensor_types=types)


def test_there_is_a_model_for_each_card() -> None:
    assert [f"a card of {row[0]}" for row in ROWS] == [card.name for card in CARDS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_model_fits_as_the_page_says(row: tuple[str, ...]) -> None:
    gigabytes, name, fetched, weights, tokens, sequences = row
    (size,) = re.findall(r"hf:Qwen/Qwen2\.5-([\d.]+B)-Instruct-GGUF:Q8_0", name)
    spec = qwen(size)
    parameters = sum(math.prod(weight.shape) for _, weight in spec.all_weights())
    assert parameters == SIZES[size][-1]
    assert float(fetched) == pytest.approx(parameters * BYTES_OF_Q8_0 / 1e9, abs=0.06)
    (card,) = (card for card in CARDS if card.name.endswith(f" {gigabytes}"))
    found = forecast(in_q8_0(size), card, Settings(), AUTO)
    assert float(weights) == pytest.approx(found.weights / GIB, abs=0.05)
    assert int(tokens.replace(",", "")) == pytest.approx(found.cache_tokens, rel=0.02)
    assert int(sequences) == pytest.approx(found.sequences[1024], rel=0.02)
    assert name in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_arithmetic_is_that_of_the_memory_plan() -> None:
    specs = [qwen(size) for size in SIZES]
    assert said("which is", "KiB") == [round(page_bytes(spec) / PAGE / 1024, 1) for spec in specs]
    workspaces = [
        forecast(in_q8_0(size), card, Settings(), AUTO).workspace
        for size, card in zip(SIZES, CARDS, strict=True)
    ]
    assert said("needs", "GiB") == pytest.approx([size / GIB for size in workspaces], abs=0.06)


def said(before: str, unit: str) -> list[float]:
    """Three numbers of the page."""
    (found,) = re.findall(rf"{before} ([\d.]+), ([\d.]+) and ([\d.]+) {unit}", PAGE_ON_MODELS)
    return [float(number) for number in found]
