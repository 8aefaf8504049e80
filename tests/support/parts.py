"""Specs of layers that few families have, or with experts alone, here with other feed-forward networks."""

from dataclasses import replace
from pathlib import Path

from gguf import GGMLQuantizationType
from gguf.quants import quantize

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import LatentAttention, Mixer, ModelSpec, Norm
from tests.support.ggufs import half_tensors, spec_tensors, write_file
from tests.support.specs import GEMMAS, variant

__all__ = ["PARTS", "file_of_halves", "file_of_q8_0", "latent_of"]


def latent_of(
    heads: int, latent: int = 512, rotated: int = 64, style: RopeStyle = RopeStyle.PAIRS
) -> LatentAttention:
    """Latent attention as of GLM-4.7-Flash, with other sizes."""
    return LatentAttention(
        heads=heads, key_dim=192, value_dim=256, latent=latent, query_latent=768, norm=Norm(1e-5),
        scale=1 / 16, rope=Rope(style=style, dim=rotated, base=1e6),
    )  # fmt: skip


def _of(*mixers: Mixer) -> ModelSpec:
    plain = variant()
    return replace(plain, layers=tuple(replace(plain.layers[0], mixer=mixer) for mixer in mixers))


_SINKS = {"heads": 16, "head_dim": 64, "sinks": True, "bias": True, "output_bias": True}
_LATENT = latent_of(4)
_SMALL = replace(latent_of(3, 40, 8), key_dim=24, value_dim=24, query_latent=40)
PARTS = {
    "sinks": _of(*(variant(attention=_SINKS | {"window": one}).layers[0].mixer for one in (20, None, 20))),  # type: ignore[arg-type]
    "latents": _of(_LATENT, _LATENT, replace(_LATENT, query_latent=None)),
    "latents of older files": _of(*[replace(_LATENT, fused=True)] * 2),
    "small latents": _of(_SMALL, _SMALL),
    "layers that read others' keys": GEMMAS["layers that read others' keys"],
}


def file_of_halves(path: Path, spec: ModelSpec) -> GgufFile:
    """A file with random weights for a spec, all of them halves."""
    return GgufFile.open(write_file(path / "model.gguf", "llama", {}, half_tensors(spec)))


def file_of_q8_0(path: Path, spec: ModelSpec) -> tuple[GgufFile, ModelSpec]:
    """The same in Q8_0, where rows are whole blocks, and the spec with what tensors are."""
    kind = GGMLQuantizationType.Q8_0
    tensors = spec_tensors(spec)
    whole = {name for name, array in tensors.items() if array.ndim > 1 and array.shape[-1] % 32 == 0}
    made = {name: quantize(one, kind) if name in whole else one for name, one in tensors.items()}
    file = GgufFile.open(write_file(path / "model.gguf", "llama", {}, made, kind))
    return file, replace(spec, tensor_types=dict.fromkeys(whole, kind.name))
