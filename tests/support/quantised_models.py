"""Random models of quantised types in the shapes of real ones, written as fast as the disk takes them.

    python -m tests.support.quantised_models qwen2.5-7b Q4_K_M q7-q4km.gguf
    python -m tests.support.quantised_models qwen3.5-9b Q4_K_M q9-q4km.gguf
    python -m tests.support.quantised_models qwen3-30b-a3b Q4_K_M q30-q4km.gguf
    python -m tests.support.quantised_models gpt-oss-20b MXFP4 oss20.gguf
    python -m tests.support.quantised_models glm-4.7-flash Q4_K_M flash.gguf
    python -m tests.support.quantised_models gemma4-26b-a4b Q4_K_M g26-q4km.gguf
    python -m tests.support.quantised_models bge-base F16 bge.gguf

Blocks are random bytes; only their scales are set, so that values have the deviation of the tests' models
(`tests.support.ggufs`) and a mean near 0, and logits are spread. Quantising floats would take minutes.

Q4_K_M and Q5_K_M are the mixtures of llama.cpp's `llama-quantize`. As there, a matrix whose rows are no
multiple of 256 has another type: Q4_K becomes Q5_0, Q5_K Q5_1, Q6_K Q8_0, Q2_K and Q3_K IQ4_NL. In MXFP4
are experts alone, as in the files of gpt-oss; other matrices are Q8_0. Of Gemma 4's inputs of layers the
table is Q5_K in mixtures, and the matrix of the product that it is added to BF16. Routers are F32 in any, and
send tokens to all experts as often; with --skew to one in eight 5 times as often as the mean.
"""

import argparse
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from nightmill.worker.model.spec import ModelSpec, Role
from tests.support.encoder_shapes import ENCODER_SHAPES, EncoderShape
from tests.support.expert_shapes import EXPERT_SHAPES, ExpertShape
from tests.support.family_models import MODELS, QWEN, Heads, Size, sized_keys, sized_spec
from tests.support.gemma4_shapes import GEMMA4_SHAPES, Gemma4Shape
from tests.support.ggufs import CHATML, add_keys
from tests.support.hybrid_shapes import HYBRID_SHAPES, HybridShape

__all__ = ["SHAPES", "TYPES", "AnyShape", "Shape", "kinds_of", "quantised", "write"]

Bytes = npt.NDArray[np.uint8]
Kind = GGMLQuantizationType


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 model, and whether its head is the embedding."""

    size: Size
    tied: bool = False

    def file(self) -> tuple[str, dict[str, Any], ModelSpec]:
        """The family, its keys, and the spec that they say."""
        model = replace(MODELS[QWEN], like=replace(MODELS[QWEN].like, tied_head=self.tied))
        spec = sized_spec(model.like, self.size)
        return model.family, sized_keys(model, self.size, len(spec.layers)), spec


SHAPES: Final = {
    "qwen2.5-0.5b": Shape(Size(layers=24, vocab=151_936, context=32_768), tied=True),
    "qwen2.5-1.5b": Shape(
        Size(
            layers=28, vocab=151_936, context=32_768, heads=Heads(12, 2, 128), width=1536, ffn=8960
        ),
        tied=True,
    ),
    "qwen2.5-7b": Shape(
        Size(
            layers=28, vocab=152_064, context=32_768, heads=Heads(28, 4, 128), width=3584, ffn=18_944
        )
    ),
    "qwen2.5-32b": Shape(
        Size(
            layers=64, vocab=152_064, context=32_768, heads=Heads(40, 8, 128), width=5120, ffn=27_648
        )
    ),
}  # fmt: skip

AnyShape = Shape | HybridShape | ExpertShape | Gemma4Shape | EncoderShape
MIXTURES: Final = {"Q4_K_M": Kind.Q4_K, "Q5_K_M": Kind.Q5_K}
"""By llama.cpp's name: the type of most matrices; the head, half of the values and of down are Q6_K."""
FALLBACKS: Final = {
    Kind.Q2_K: Kind.IQ4_NL, Kind.Q3_K: Kind.IQ4_NL, Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1,
    Kind.Q6_K: Kind.Q8_0,
}  # fmt: skip
# Where a block keeps its scale, a half, and the minimum that goes with it, with what makes the mean 0:
# values are scale * q + minimum, or scale * q - minimum, of q from 0 to twice that.
SCALES: Final = {
    Kind.Q8_0: (0, None, 0.0), Kind.Q4_0: (0, None, 0.0), Kind.Q5_0: (0, None, 0.0),
    Kind.IQ4_NL: (0, None, 0.0), Kind.Q4_1: (0, 2, -7.5), Kind.Q5_1: (0, 2, -15.5),
    Kind.Q2_K: (80, 82, 1.5), Kind.Q3_K: (108, None, 0.0), Kind.Q4_K: (0, 2, 7.5), Kind.Q5_K: (0, 2, 15.5),
    Kind.Q6_K: (208, None, 0.0),
}  # fmt: skip
FLOATS: Final = (Kind.F16, Kind.BF16)
TYPES: Final = (*MIXTURES, *(kind.name for kind in (*SCALES, Kind.MXFP4, *FLOATS)))
_IN_MIXTURES: Final = {Role.LAYER_EMBEDDING: Kind.Q5_K, Role.LAYER_PROJECTION: Kind.BF16}
_E2M1_DEVIATION: Final = 2.93  # of its numbers, each as likely
POOL_BYTES: Final = 64 << 20
_SKEW: Final = 4.0  # of 8 experts of 128, 5 are then among the 16 whose logits spread so much more
_DIVISORS = "rope_freqs.weight"
_SAMPLE = 4096  # blocks, of which the deviation is measured
_THREADS = 16


def main() -> None:
    """Write the model that is asked for."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("shape", choices=_all_shapes())
    arguments.add_argument("type", choices=TYPES)
    arguments.add_argument("path", type=Path, metavar="OUT.gguf")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--skew", action="store_true", help="some experts are chosen more often")
    options = arguments.parse_args()
    write(options.path, _all_shapes()[options.shape], options.type, seed=options.seed, skew=options.skew)


def _all_shapes() -> dict[str, AnyShape]:
    return {**SHAPES, **HYBRID_SHAPES, **EXPERT_SHAPES, **GEMMA4_SHAPES, **ENCODER_SHAPES}


def kinds_of(spec: ModelSpec, type_name: str) -> dict[str, Kind]:
    """The type of each tensor of a model that is quantised to this type, or mixture; vectors stay F32."""
    base = MIXTURES.get(type_name) or Kind[type_name]
    head = Role.EMBEDDING if spec.tied_head else Role.HEAD
    kinds = {}
    for role, weight in spec.all_weights():
        for name, shape in weight.parts:
            multiplied = (weight.is_matrix and role is not Role.ROUTER) or weight.is_matrices
            kind = base if multiplied or role is Role.LAYER_EMBEDDING else Kind.F32
            if type_name in MIXTURES and role in _IN_MIXTURES:
                kind, multiplied = _IN_MIXTURES[role], False
            better = role is head or (_is_more(name) and _more_bits(name, len(spec.layers)))
            if type_name in MIXTURES and multiplied and better:
                kind = Kind.Q6_K
            if kind is Kind.MXFP4 and not weight.is_matrices:
                kind = Kind.Q8_0
            if kind in FALLBACKS and shape[-1] % 256:
                kind = FALLBACKS[kind]
            kinds[name] = kind
    return kinds


def quantised(spec: ModelSpec, type_name: str = "Q4_K_M") -> ModelSpec:
    """Return a model with the types that its tensors would have in a file."""
    return replace(spec, tensor_types={name: kind.name for name, kind in kinds_of(spec, type_name).items()})


def _is_more(name: str) -> bool:
    return name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight"))


def _more_bits(name: str, layers: int) -> bool:
    """Layers of the first and last eighth, and each third between: `use_more_bits` of llama.cpp."""
    layer = int(name.split(".")[1])
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def write(
    path: Path, shape: AnyShape, type_name: str, *, seed: int = 0, pool_bytes: int = POOL_BYTES,
    skew: bool = False,
) -> Path:  # fmt: skip
    """Write the file and return `path`; matrices are cut from pools of so many random bytes.

    skew  routers choose one expert in eight 5 times as often as the mean
    """
    family, keys, spec = shape.file()
    kinds = kinds_of(spec, type_name)
    divisors = next((rope.divisors for rope in spec.ropes if rope.divisors), ())
    ends = _write_header(path, family, keys, spec, kinds, len(divisors))
    gains = {Role.EMBEDDING: 2.5, Role.HEAD: 2.5}
    noise = _Noise(seed, pool_bytes, _SKEW if skew else 1.0)
    with path.open("r+b") as file, ThreadPoolExecutor(_THREADS) as pool:
        file.truncate(max(end for _, end in ends.values()))
        written = []
        if divisors:
            held = np.array(divisors, dtype=np.float32).view(np.uint8)
            written.append(pool.submit(_fill, file.fileno(), *ends[_DIVISORS], held, 0))
        for role, weight in spec.all_weights():
            for name, sizes in weight.parts:
                if kinds[name] is not Kind.F32:
                    data, start = noise.blocks(kinds[name], gains.get(role, 1.5) / sizes[-1] ** 0.5)
                else:
                    data, start = noise.vector(role, sizes), 0
                written.append(pool.submit(_fill, file.fileno(), *ends[name], data, start))
        for one in written:
            one.result()
    return path


def _write_header(
    path: Path, family: str, keys: Mapping[str, Any], spec: ModelSpec, kinds: Mapping[str, Kind],
    divisors: int = 0,
) -> dict[str, tuple[int, int]]:  # fmt: skip
    """Write all but the tensors; returns where in the file each of them begins and ends.

    divisors  of angles that the file has
    """
    writer = GGUFWriter(path, family)
    add_keys(writer, family, keys)
    writer.add_string("tokenizer.chat_template", CHATML)
    sizes = {}
    for _, weight in spec.all_weights():
        for name, shape in weight.parts:
            numbers, block = GGML_QUANT_SIZES[kinds[name]]
            stored = (*shape[:-1], shape[-1] // numbers * block)
            sizes[name] = int(np.prod(stored))
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), sizes[name], kinds[name])
    if divisors:
        sizes[_DIVISORS] = 4 * divisors
        writer.add_tensor_info(_DIVISORS, (divisors,), np.dtype(np.float32), 4 * divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()

    def aligned(place: int) -> int:
        return -(-place // writer.data_alignment) * writer.data_alignment

    ends, place = {}, path.stat().st_size
    for name, taken in sizes.items():
        begin = aligned(place)
        place = begin + taken
        ends[name] = (begin, place)
    return ends


def _fill(file: int, begin: int, end: int, data: Bytes, start: int) -> None:
    """Write `data` from `start` on, round and round, to that place of a file."""
    while begin < end:
        begin += os.pwrite(file, data[start : start + end - begin], begin)
        start = 0


class _Noise:
    """Pools of random blocks, one for each type and deviation, made of the same random bytes."""

    def __init__(self, seed: int, pool_bytes: int, skew: float = 1.0) -> None:
        self._rng = np.random.default_rng(seed)
        self._skew = skew
        self._bytes = np.frombuffer(self._rng.bytes(pool_bytes), np.uint8)
        self._pools: dict[tuple[Kind, float], Bytes] = {}

    def blocks(self, kind: Kind, deviation: float) -> tuple[Bytes, int]:
        """Whole blocks of values with that deviation, and where in them a matrix begins."""
        if (kind, deviation) not in self._pools:
            made = self._floats(kind, deviation) if kind in FLOATS else self._quants(kind, deviation)
            self._pools[kind, deviation] = made
        blocks = self._pools[kind, deviation]
        size = GGML_QUANT_SIZES[kind][1]
        return blocks, int(self._rng.integers(len(blocks) // size)) * size

    def vector(self, role: Role, shape: tuple[int, ...]) -> Bytes:
        """Floats as a vector of that role has them, or a matrix that is no product."""
        values = self._rng.standard_normal(int(np.prod(shape)))
        if role is Role.DECAY:
            values = -np.exp(values)
        elif role is Role.CONVOLUTION:
            values *= shape[1] ** -0.5
        elif role is Role.ROUTER:
            values *= 1.5 * shape[1] ** -0.5
            values[: shape[0] // 8 * shape[1]] *= self._skew
        else:
            around_one = role.endswith("norm") or role in (Role.LAYER_SCALE, Role.EXPERTS_DOWN_SCALE)
            values = (1.0 if around_one else 0.0) + 0.1 * values
            if role is Role.ROUTER_NORM:  # what the router reads is divided by that
                values *= shape[0] ** 0.5
        return values.astype(np.float32).view(np.uint8)

    def _floats(self, kind: Kind, deviation: float) -> Bytes:
        values = self._rng.standard_normal(len(self._bytes) // 2, dtype=np.float32) * np.float32(deviation)
        if kind is Kind.BF16:  # the upper half of a float
            return values.view(np.uint16)[1::2].copy().view(np.uint8)
        return values.astype(np.float16).view(np.uint8)

    def _quants(self, kind: Kind, deviation: float) -> Bytes:
        size = GGML_QUANT_SIZES[kind][1]
        blocks = self._bytes[: len(self._bytes) // size * size].reshape(-1, size).copy()
        if kind is Kind.MXFP4:  # a byte of exponent, of half or all of the deviation
            exponent = 127 + round(np.log2(deviation / _E2M1_DEVIATION))
            blocks[:, 0] = exponent - blocks[:, 0] % 2
            return blocks.reshape(-1)
        if kind in (Kind.Q4_K, Kind.Q5_K):  # minima as the scales: eight of six bits each, in twelve bytes
            blocks[:, 8:12] = blocks[:, 4:8]
            blocks[:, 12:16] = blocks[:, 12:16] & 15 | blocks[:, 12:16] << 4
        elif kind is Kind.Q2_K:  # sixteen of four bits each
            blocks[:, :16] = blocks[:, :16] & 15 | blocks[:, :16] << 4
        at, low, centre = SCALES[kind]
        spread = self._rng.uniform(0.5, 1.5, len(blocks))  # of scales: no two blocks are alike
        spread *= self._rng.choice((-1, 1), len(blocks))  # quants from -8 to 7 have a mean

        def scale(by: float) -> None:
            scales = (by * spread).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
            if low is not None:
                minima = (scales * np.float16(centre)).astype(np.float16)
                blocks[:, low : low + 2] = minima.view(np.uint8).reshape(-1, 2)

        scale(1.0)
        scale(deviation / float(dequantize(blocks[:_SAMPLE], kind).std()))
        return blocks.reshape(-1)


if __name__ == "__main__":
    main()
