"""A random model in the shape of GLM-4.7-Flash but for its experts: what latent attention takes of a step.

    python -m tests.support.latent_shapes Q8_0 flash-dense.gguf

Layers have a dense network as wide as the experts that a token goes through are together, so that as many
weights are active. The types, and what numbers are, are those of `tests.support.quantised_models`.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import FeedForward, LatentAttention, LayerSpec, ModelSpec, Norm
from tests.support.quantised_models import TYPES, write

__all__ = ["FLASH", "LatentShape"]

_NORM = Norm(2**-20)


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of a model; head: of a key without what is rotated, of that, and of a value."""

    layers: int = 47
    width: int = 2048
    ffn: int = 5 * 1536
    vocab: int = 154_880
    heads: int = 20
    head: tuple[int, int, int] = (192, 64, 256)
    latent: int = 512
    query_latent: int = 768
    context: int = 32_768

    def file(self) -> tuple[str, dict[str, Any], ModelSpec]:
        """The family, its keys, and the spec that they say."""
        own, rotated, values = self.head
        kept = self.latent + rotated
        keys = {
            "block_count": self.layers, "context_length": self.context, "embedding_length": self.width,
            "feed_forward_length": self.ffn, "attention.head_count": self.heads,
            "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": _NORM.eps,
            "attention.kv_lora_rank": self.latent, "attention.q_lora_rank": self.query_latent,
            "attention.key_length": kept, "attention.value_length": self.latent,
            "attention.key_length_mla": own + rotated, "attention.value_length_mla": values,
            "rope.dimension_count": rotated, "rope.freq_base": 1e6,
            "leading_dense_block_count": self.layers,
        }  # fmt: skip
        scaling = RopeScaling(original_context=self.context)
        mixer = LatentAttention(
            heads=self.heads, key_dim=own, value_dim=values, latent=self.latent,
            query_latent=self.query_latent, norm=_NORM, scale=1 / math.sqrt(own + rotated),
            rope=Rope(style=RopeStyle.PAIRS, dim=rotated, base=1e6, scaling=scaling),
        )  # fmt: skip
        layer = LayerSpec(
            attention_norm=_NORM, mixer=mixer, feed_forward_norm=_NORM,
            feed_forward=FeedForward(width=self.ffn),
        )  # fmt: skip
        spec = ModelSpec(
            family="deepseek2", name="model", width=self.width, vocab=self.vocab,
            context_length=self.context, layers=(layer,) * self.layers, output_norm=_NORM, tied_head=False,
        )  # fmt: skip
        return spec.family, keys, spec


FLASH = LatentShape()


def main() -> None:
    """Write the model."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("type", choices=TYPES)
    arguments.add_argument("path", type=Path, metavar="OUT.gguf")
    arguments.add_argument("--layers", type=int, default=FLASH.layers)
    options = arguments.parse_args()
    write(options.path, LatentShape(layers=options.layers), options.type)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
