"""Random models of every family, with the keys that llama.cpp's converter writes for it, in any size.

Written in about the time that a disk takes: matrices are cut from one pool of noise. They are scaled as those
of the tests (`ggufs.spec_tensors`), so that logits are spread and every weight matters. Where a family
scales embeddings or logits, the tables and the last norm undo it: else the layers would vanish beside an
embedding that a tied head echoes, or logits would be flat, and no fault would show.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from nightmill.worker.model.spec import LayerSpec, ModelSpec, Role
from tests.support.family_cases import GPU_FILES, HALVES, KEYS, NORM, PAIRS, SIZED, layer, model
from tests.support.gemma4_cases import GEMMA4_FILES
from tests.support.ggufs import write_file

__all__ = [
    "MODELS", "QWEN", "FamilyModel", "Heads", "Size", "families", "full_size", "sized_keys", "sized_spec",
    "small_size", "write",
]  # fmt: skip

T = TypeVar("T")
QWEN: Final = "qwen2"


@dataclass(frozen=True)
class FamilyModel:
    """Keys, and a spec whose tensors the file has; both of any size.

    divisors  names of tensors that divide the rotation's frequencies
    """

    keys: Mapping[str, Any]
    like: ModelSpec
    divisors: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """`general.architecture`."""
        return self.like.family


LONG_PHI = {
    "attention.sliding_window": 0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.attn_factor": 1.19,
}
FIRST = {
    QWEN: FamilyModel({"rope.freq_base": 1e6}, model(QWEN, layer(HALVES, bias=True))),
    "qwen3": FamilyModel(SIZED, model("qwen3", layer(HALVES, qk_norm=NORM))),
    "llama": FamilyModel({"rope.dimension_count": 16}, model("llama", layer(PAIRS))),
    "llama, its own head": FamilyModel({}, model("llama", layer(PAIRS), tied_head=False)),
    "llama, Llama 3's rotation": FamilyModel({}, model("llama", layer(PAIRS)), ("rope_freqs",)),
}  # fmt: skip
"""Those that have no file in `tests/unit/model/test_family_keys.py`."""
MODELS: Final[dict[str, FamilyModel]] = (
    FIRST
    | {name: FamilyModel(*found) for name, found in GPU_FILES.items() if name not in GEMMA4_FILES}
    | {
        "phi3, long factors": FamilyModel(
            LONG_PHI, GPU_FILES["phi3, without a window"][1], ("rope_factors_short", "rope_factors_long")
        )
    }
)
"""By family; with what makes it another model of the family behind a comma or a blank."""


@dataclass(frozen=True)
class Heads:
    """Of attention: queries, keys and values, and their size."""

    queries: int = 14
    keys: int = 2
    size: int = 64


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a model is made; `windows`: by family, where a file has one."""

    layers: int
    vocab: int
    context: int
    heads: Heads = Heads()
    width: int = 896
    ffn: int = 4864
    windows: Mapping[str, int] = field(default_factory=dict)


_WINDOWS = {"gemma2": 4096, "gemma3": 512, "phi3": 2047, "cohere2": 4096}
_HEADS = {  # of families whose heads have another size than the 0.5B's in all models, or in the smallest
    "gemma2": Heads(4, 1, 256), "gemma3": Heads(4, 1, 256), "phi3": Heads(10, 2, 96),
    "qwen3": Heads(7, 1, 128), "smollm3": Heads(7, 1, 128), "mistral3": Heads(7, 1, 128),
    "olmo2": Heads(7, 1, 128), "ernie4_5": Heads(7, 1, 128), "glm4": Heads(7, 1, 128),
    "starcoder2": Heads(7, 1, 128), "command-r": Heads(7, 1, 128), "cohere2": Heads(7, 1, 128),
    "hunyuan-dense": Heads(7, 1, 128), "seed_oss": Heads(7, 1, 128),
}  # fmt: skip


def full_size(family: str) -> Size:
    """That of Qwen2.5-0.5B, with about as many elements of queries; heads and windows are the family's."""
    return Size(layers=24, vocab=151_936, context=4096, windows=_WINDOWS, heads=_HEADS.get(family, Heads()))


def small_size(family: str) -> Size:
    """A few of its layers, with a small vocabulary, and windows that some hundred tokens outgrow."""
    return replace(full_size(family), layers=4, vocab=2048, context=512, windows={"gemma2": 100})


def families(wanted: list[str]) -> dict[str, FamilyModel]:
    """The models of these families, in the order of `MODELS`; all if none is named. Raises SystemExit."""
    known = {found.family for found in MODELS.values()}
    if unknown := sorted(set(wanted) - known):
        raise SystemExit(f"{', '.join(unknown)}: no such family; there are {', '.join(sorted(known))}")
    return {name: found for name, found in MODELS.items() if not wanted or found.family in wanted}


def write(path: Path, model: FamilyModel, size: Size, dtype: str = "auto", *, seed: int = 0) -> Path:
    """Write the file and return `path`.

    dtype  of its matrices, f16 or bf16; "auto": as models of the family are computed
    """
    like = sized_spec(model.like, size)
    gains = {
        Role.EMBEDDING: 2.5 / like.embedding_scale,
        Role.HEAD: 2.5,
        Role.OUTPUT_NORM: (like.embedding_scale if like.tied_head else 1.0) / like.logit_scale,
    }
    in_bf16 = dtype == "bf16" or (dtype == "auto" and like.overflows_half)
    noise, tensors = _Noise(GGMLQuantizationType.BF16 if in_bf16 else GGMLQuantizationType.F16, seed), {}
    for role, weight in like.all_weights():
        for name, shape in weight.parts:
            if weight.is_matrix:
                tensors[name] = noise.matrix(shape, gains.get(role, 1.5) / shape[1] ** 0.5)
            else:
                gain = gains.get(role, 1.0)
                mean, deviation = (gain, 0.1 * gain) if role.endswith("norm") else (0.0, 0.2)
                tensors[name] = noise.vector(shape, mean, deviation)
    rotated = like.layers[0].attention.rope.dim
    for name in model.divisors:
        tensors[f"{name}.weight"] = np.linspace(1, 8, rotated // 2, dtype=np.float32)
    return write_file(path, model.family, sized_keys(model, size, len(like.layers)), tensors)


def sized_spec(like: ModelSpec, size: Size) -> ModelSpec:
    """The spec in this size; at least as many layers as it has, which go on in turn."""
    heads = size.heads

    def sized(layer: LayerSpec) -> LayerSpec:
        rope = replace(layer.attention.rope, dim=_of_head(layer.attention.rope.dim, heads))
        attention = replace(
            layer.attention, heads=heads.queries, kv_heads=heads.keys, head_dim=heads.size, rope=rope
        )
        return replace(layer, mixer=attention, feed_forward=replace(layer.feed_forward, width=size.ffn))

    layers = _in_turn(like.layers, max(size.layers, len(like.layers)))
    by_width = like.embedding_scale == like.width**0.5  # no key says this one
    return replace(
        like, width=size.width, vocab=size.vocab, layers=tuple(map(sized, layers)),
        embedding_scale=size.width**0.5 if by_width else like.embedding_scale,
    )  # fmt: skip


def sized_keys(model: FamilyModel, size: Size, layers: int) -> dict[str, Any]:
    """The keys that say so, of that many layers."""
    heads = size.heads
    keys = KEYS | dict(model.keys)
    keys |= {
        "block_count": layers, "context_length": size.context, "embedding_length": size.width,
        "feed_forward_length": size.ffn, "attention.head_count": heads.queries,
        "attention.head_count_kv": heads.keys, "attention.key_length": heads.size,
        "attention.value_length": heads.size,
    }  # fmt: skip
    if "vocab_size" in keys:
        keys["vocab_size"] = size.vocab
    if "rope.dimension_count" in keys:
        keys["rope.dimension_count"] = _of_head(keys["rope.dimension_count"], heads)
    if keys.get("attention.sliding_window") and model.family in size.windows:
        keys["attention.sliding_window"] = size.windows[model.family]
    if isinstance(pattern := keys.get("attention.sliding_window_pattern"), list):
        keys["attention.sliding_window_pattern"] = _in_turn(pattern, layers)
    return keys


def _in_turn(kinds: Iterable[T], count: int) -> list[T]:
    return list(islice(cycle(kinds), count))


def _of_head(elements: int, heads: Heads) -> int:
    """Elements that are rotated, given for heads of the small models' size."""
    return elements * heads.size // SIZED["attention.key_length"]


class _Noise:
    """Matrices and vectors of normal noise; a matrix begins somewhere in one pool and goes round in it."""

    def __init__(self, kind: GGMLQuantizationType, seed: int) -> None:
        self._kind = kind
        self._rng = np.random.default_rng(seed)
        self._pool = self._rng.standard_normal(1 << 22, dtype=np.float32)
        self._scaled: dict[float, npt.NDArray[Any]] = {}

    def matrix(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[Any]:
        """In the type of the file: F16, or the bytes of BF16."""
        if deviation not in self._scaled:
            scaled = self._pool * np.float32(deviation)
            if self._kind is GGMLQuantizationType.BF16:  # the upper half of a float
                self._scaled[deviation] = scaled.view(np.uint16)[1::2].copy()
            else:
                self._scaled[deviation] = scaled.astype(np.float16)
        pool = self._scaled[deviation]
        start = int(self._rng.integers(len(pool)))
        drawn, filled = np.empty(shape, pool.dtype), 0
        while filled < drawn.size:
            piece = pool[start : start + drawn.size - filled]
            drawn.reshape(-1)[filled : filled + len(piece)] = piece
            filled, start = filled + len(piece), 0
        return drawn.view(np.uint8) if self._kind is GGMLQuantizationType.BF16 else drawn

    def vector(self, shape: tuple[int, ...], mean: float, deviation: float) -> npt.NDArray[np.float32]:
        """Always float."""
        return (mean + deviation * self._rng.standard_normal(shape)).astype(np.float32)
