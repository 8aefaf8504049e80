"""What a runner must know about a model, proved against the file: metadata and every tensor's shape agree.

Nothing here is an assumption about a model family's sizes. What the metadata lacks is read off tensor
shapes; what is missing or contradictory is a ModelFileError that names the key or tensor.
"""

from dataclasses import dataclass
from typing import Final, Literal, Self, cast

import numpy as np
import numpy.typing as npt

from nightmill.worker.model import rope
from nightmill.worker.model.gguf_file import GgufFile
from nightmill.worker.model.rope import RopeScaling, RopeStyle

__all__ = ["ModelConfig", "RopeScaling", "RopeStyle", "expected_tensors", "rope_frequencies"]

ARCHITECTURES: Final = {
    "llama": RopeStyle.PAIRS,
    "qwen2": RopeStyle.HALVES,
    "qwen3": RopeStyle.HALVES,
}

# Keys that change the arithmetic, with the value (besides absence) at which they do not.
_REFUSED_KEYS: Final[dict[str, float]] = {
    "expert_count": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "rope.scaling.alpha": 0,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
_MAX_SIZE: Final = 1 << 24  # of any one dimension
_ROPE_FREQS: Final = "rope_freqs.weight"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes and switches of one decoder-only transformer."""

    architecture: str
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocab: int  # rows of token_embd.weight; the tokenizer may have fewer tokens (padding)
    rope_base: float
    rope_dim: int  # leading elements of each head that are rotated
    rope_scaling: RopeScaling
    rope_style: RopeStyle
    norm_eps: float
    context_length: int
    tied_head: bool  # the LM head is token_embd.weight
    qkv_bias: bool
    qk_norm: bool  # RMS norm of each head's query and key, before rotation

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        """Read and check; raises ModelFileError that names the key or tensor at fault."""
        architecture = file.string("general.architecture")
        if architecture not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            file.fail(f"general.architecture: {architecture!r} is not supported; supported are {supported}")
        if (parts := file.integer("split.count", default=0)) > 1:
            file.fail(f"split.count: is one of {parts} parts; join them with `llama-gguf-split --merge`")
        if not file.tensors:
            file.fail("holds no tensors, only a vocabulary; give a file with the model's weights")
        _refuse_other_arithmetic(file, architecture)

        def size(key: str) -> int:
            return file.integer(f"{architecture}.{key}", minimum=1, maximum=_MAX_SIZE)

        layers = file.integer(f"{architecture}.block_count", minimum=1, maximum=4096)
        width = size("embedding_length")
        heads = _same_in_all_layers(file, f"{architecture}.attention.head_count", layers)
        if heads is None:
            file.fail(f"{architecture}.attention.head_count: the key is missing")
        kv_heads = _same_in_all_layers(file, f"{architecture}.attention.head_count_kv", layers) or heads
        if heads % kv_heads:
            file.fail(f"{architecture}.attention.head_count_kv: {kv_heads} does not divide {heads} heads")
        head_dim = _head_dim(file, architecture, width, heads)
        ffn_width = _rows(file, "blk.0.ffn_up.weight")
        declared_ffn = _same_in_all_layers(file, f"{architecture}.feed_forward_length", layers)
        if declared_ffn not in (None, ffn_width):
            file.fail(
                f"{architecture}.feed_forward_length: is {declared_ffn}, "
                f"but blk.0.ffn_up.weight has {ffn_width} rows"
            )
        context_length = size("context_length")
        rope_base = _positive(file, f"{architecture}.rope.freq_base", 10_000.0)
        if rope_base <= 1:
            file.fail(f"{architecture}.rope.freq_base: is {rope_base:g}, expected more than 1")
        config = cls(
            architecture=architecture,
            name=file.string("general.name", default="") or file.path.stem,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_width=ffn_width,
            vocab=_vocab(file, architecture),
            rope_base=rope_base,
            rope_dim=_rope_dim(file, architecture, head_dim),
            rope_scaling=_rope_scaling(file, architecture, context_length),
            rope_style=ARCHITECTURES[architecture],
            norm_eps=_positive(file, f"{architecture}.attention.layer_norm_rms_epsilon", None),
            context_length=context_length,
            tied_head="output.weight" not in file.tensors,
            qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
            qk_norm=architecture == "qwen3",
        )
        _check_tensors(file, config)
        return config


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor a model of this configuration has, with its row-major shape (outputs, inputs)."""
    width, ffn = config.width, config.ffn_width
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    block: dict[str, Shape] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (queries, width),
        "attn_k.weight": (keys, width),
        "attn_v.weight": (keys, width),
        "attn_output.weight": (width, queries),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (ffn, width),
        "ffn_up.weight": (ffn, width),
        "ffn_down.weight": (width, ffn),
    }
    if config.qkv_bias:
        block |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if config.qk_norm:
        block |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    table: dict[str, Shape] = {"token_embd.weight": (config.vocab, width), "output_norm.weight": (width,)}
    if not config.tied_head:
        table["output.weight"] = (config.vocab, width)
    for layer in range(config.layers):
        table |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return table


def rope_frequencies(
    config: ModelConfig, divisors: npt.ArrayLike | None = None
) -> tuple[npt.NDArray[np.float64], float]:
    """Radians per position, shape (rope_dim / 2,), and the magnitude that multiplies cosine and sine.

    `divisors`: `file.array("rope_freqs.weight")` where the file has that tensor (Llama 3), else None.
    """
    scaling = config.rope_scaling
    return rope.frequencies(config.rope_base, config.rope_dim, scaling, divisors), scaling.magnitude


def _refuse_other_arithmetic(file: GgufFile, architecture: str) -> None:
    for key, neutral in _REFUSED_KEYS.items():
        value = file.number(f"{architecture}.{key}", default=neutral)
        if value != neutral:
            file.fail(f"{architecture}.{key}: {value:g} asks for arithmetic that is not supported")
    if not file.boolean(f"{architecture}.attention.causal", default=True):
        file.fail(f"{architecture}.attention.causal: this is an encoder, it cannot generate text")
    window = file.integer(f"{architecture}.attention.sliding_window", default=0)
    if 0 < window < file.integer(f"{architecture}.context_length", default=0):
        file.fail(f"{architecture}.attention.sliding_window: sliding-window attention is not supported")


def _same_in_all_layers(file: GgufFile, key: str, layers: int) -> int | None:
    """A size that may be given once or per layer; None where the key lacks."""
    if not file.is_array(key):
        return file.integer(key, minimum=1, maximum=_MAX_SIZE, default=None)
    given = file.integers(key)
    if len(given) != layers:
        file.fail(f"{key}: has {len(given)} entries for {layers} layers")
    sizes = set(given)
    if len(sizes) != 1:
        file.fail(f"{key}: layers of different sizes are not supported")
    value = sizes.pop()
    if not 1 <= value <= _MAX_SIZE:
        file.fail(f"{key}: is {value}, expected 1 to {_MAX_SIZE}")
    return value


def _head_dim(file: GgufFile, architecture: str, width: int, heads: int) -> int:
    key = f"{architecture}.attention.key_length"
    head_dim = file.integer(key, minimum=1, maximum=_MAX_SIZE, default=None)
    if head_dim is None:
        if width % heads:
            file.fail(f"{key}: is missing, and a width of {width} is not a multiple of {heads} heads")
        head_dim = width // heads
    value_length = file.integer(f"{architecture}.attention.value_length", default=head_dim)
    if value_length != head_dim:
        file.fail(
            f"{architecture}.attention.value_length: {value_length} differs from the keys' {head_dim}, "
            "which is not supported"
        )
    return head_dim


def _rows(file: GgufFile, name: str) -> int:
    info = file.tensors.get(name)
    if info is None:
        file.fail(f"tensor {name}: is missing")
    if len(info.shape) != 2:
        file.fail(f"tensor {name}: has shape {info.shape}, expected two dimensions")
    return info.shape[0]


def _vocab(file: GgufFile, architecture: str) -> int:
    rows = _rows(file, "token_embd.weight")
    tokens = file.count("tokenizer.ggml.tokens")
    if tokens > rows:
        file.fail(f"tokenizer.ggml.tokens: {tokens} tokens, but token_embd.weight has only {rows} rows")
    declared = file.integer(f"{architecture}.vocab_size", default=rows)
    if declared > rows:
        file.fail(f"{architecture}.vocab_size: is {declared}, but token_embd.weight has only {rows} rows")
    return rows


def _rope_dim(file: GgufFile, architecture: str, head_dim: int) -> int:
    key = f"{architecture}.rope.dimension_count"
    rope_dim = file.integer(key, minimum=1, maximum=_MAX_SIZE, default=head_dim)
    if rope_dim != head_dim:
        file.fail(f"{key}: rotating {rope_dim} of {head_dim} elements of a head is not supported")
    if rope_dim % 2:
        file.fail(f"{key}: a head of {rope_dim} elements has no pairs to rotate")
    return rope_dim


def _rope_scaling(file: GgufFile, architecture: str, context_length: int) -> RopeScaling:
    # llama.cpp's reading: a factor without a type is linear; `scale_linear` is the factor's old name.
    prefix = f"{architecture}.rope.scaling."
    kind = file.string(f"{prefix}type", default="linear")
    if kind not in ("none", "linear", "yarn"):
        file.fail(f"{prefix}type: {kind!r} is not supported; supported are none, linear, yarn")
    factor_key = f"{prefix}factor"
    if factor_key not in file:
        factor_key = f"{architecture}.rope.scale_linear"
    # 0 is how files spell "unset".
    factor = file.number(factor_key, default=0.0) or 1.0
    if factor <= 0:
        file.fail(f"{factor_key}: is {factor:g}, expected more than 0")
    if kind == "linear" and factor == 1.0:
        kind = "none"
    return RopeScaling(
        kind=cast(Literal["none", "linear", "yarn"], kind),
        factor=factor if kind != "none" else 1.0,
        attention_factor=_positive(file, f"{prefix}attn_factor", 1.0),
        original_context=file.integer(
            f"{prefix}original_context_length", minimum=1, maximum=2**31, default=context_length
        ),
        beta_fast=_positive(file, f"{prefix}yarn_beta_fast", 32.0),
        beta_slow=_positive(file, f"{prefix}yarn_beta_slow", 1.0),
    )


def _positive(file: GgufFile, key: str, default: float | None) -> float:
    value = file.number(key) if default is None else file.number(key, default=default)
    if value <= 0:
        file.fail(f"{key}: is {value:g}, expected more than 0")
    return value


def _check_tensors(file: GgufFile, config: ModelConfig) -> None:
    expected = expected_tensors(config)
    for name, shape in expected.items():
        info = file.tensors.get(name)
        if info is None:
            file.fail(f"tensor {name}: is missing")
        if info.shape != shape:
            file.fail(f"tensor {name}: has shape {info.shape}, expected {shape} from the metadata")
        file.require_readable(name)
    if (freqs := file.tensors.get(_ROPE_FREQS)) is not None:
        if freqs.shape != (config.rope_dim // 2,):
            file.fail(f"tensor {_ROPE_FREQS}: has shape {freqs.shape}, expected {(config.rope_dim // 2,)}")
        divisors = file.array(_ROPE_FREQS)
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            file.fail(f"tensor {_ROPE_FREQS}: holds a divisor that is not a positive number")
    # Whatever else the file holds (experts, fused or extra biases, adapters) would change the results.
    # attn_rot_embd is the exception: old converters wrote the rotation's frequencies, which are derived.
    extra = [
        name
        for name in file.tensors
        if name not in expected and name != _ROPE_FREQS and not name.endswith(".attn_rot_embd")
    ]
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        file.fail(f"tensor {extra[0]}{more}: is not part of the supported {config.architecture} model")
