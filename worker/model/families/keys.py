"""A family's metadata, read as the parts of a spec: each reader checks what it reads.

Readers raise ModelFileError, which names the key or tensor at fault.
"""

from typing import Final, Literal, cast

import numpy as np

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import Attention, FeedForward, Norm

__all__ = ["ROPE_DIVISORS", "Keys"]

ROPE_DIVISORS: Final = "rope_freqs.weight"

# Keys that change the arithmetic, with the value (besides absence) at which they do not.
_OTHER_ARITHMETIC: Final[dict[str, float]] = {
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


class Keys:
    """The keys under a family's name, and the tensors beside them."""

    def __init__(self, file: GgufFile, family: str) -> None:
        self.file = file
        self.family = family

    def name(self, key: str) -> str:
        """The whole key, as messages show it."""
        return f"{self.family}.{key}"

    def size(self, key: str) -> int:
        """A dimension of something, which must be given."""
        return self.file.integer(self.name(key), minimum=1, maximum=_MAX_SIZE)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number over 0; without a default it must be given."""
        name = self.name(key)
        value = self.file.number(name) if default is None else self.file.number(name, default=default)
        if value <= 0:
            self.file.fail(f"{name}: is {value:g}, expected more than 0")
        return value

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of that name."""
        return name in self.file.tensors

    def refuse_other_arithmetic(self) -> None:
        """Fail where a key asks for what no spec says."""
        file = self.file
        for key, neutral in _OTHER_ARITHMETIC.items():
            value = file.number(self.name(key), default=neutral)
            if value != neutral:
                file.fail(f"{self.name(key)}: {value:g} asks for arithmetic that is not supported")
        if not file.boolean(self.name("attention.causal"), default=True):
            file.fail(f"{self.name('attention.causal')}: this is an encoder, it cannot generate text")
        window = file.integer(self.name("attention.sliding_window"), default=0)
        if 0 < window < file.integer(self.name("context_length"), default=0):
            file.fail(f"{self.name('attention.sliding_window')}: sliding-window attention is not supported")

    def block_count(self) -> int:
        """The number of layers."""
        return self.file.integer(self.name("block_count"), minimum=1, maximum=4096)

    def vocab(self) -> int:
        """Rows of the embedding; the tokenizer has no more tokens."""
        rows = self._rows("token_embd.weight")
        tokens = self.file.count("tokenizer.ggml.tokens")
        if tokens > rows:
            self.file.fail(
                f"tokenizer.ggml.tokens: {tokens} tokens, but token_embd.weight has only {rows} rows"
            )
        declared = self.file.integer(self.name("vocab_size"), default=rows)
        if declared > rows:
            self.file.fail(
                f"{self.name('vocab_size')}: is {declared}, but token_embd.weight has only {rows} rows"
            )
        return rows

    def norm(self) -> Norm:
        """The norm that all places of these families have."""
        return Norm(self.positive("attention.layer_norm_rms_epsilon"))

    def attention(
        self, *, layers: int, width: int, style: RopeStyle, bias: bool, qk_norm: Norm | None
    ) -> Attention:
        """Attention that is the same in all layers."""
        heads = self._same_in_all_layers("attention.head_count", layers)
        if heads is None:
            self.file.fail(f"{self.name('attention.head_count')}: the key is missing")
        kv_heads = self._same_in_all_layers("attention.head_count_kv", layers) or heads
        if heads % kv_heads:
            self.file.fail(
                f"{self.name('attention.head_count_kv')}: {kv_heads} does not divide {heads} heads"
            )
        head_dim = self._head_dim(width, heads)
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=self.rope(style, head_dim),
            bias=bias,
            qk_norm=qk_norm,
        )

    def feed_forward(self, *, layers: int) -> FeedForward:
        """A feed-forward network that is the same in all layers."""
        width = self._rows("blk.0.ffn_up.weight")
        declared = self._same_in_all_layers("feed_forward_length", layers)
        if declared not in (None, width):
            self.file.fail(
                f"{self.name('feed_forward_length')}: is {declared}, but blk.0.ffn_up.weight has {width} rows"
            )
        return FeedForward(width=width)

    def rope(self, style: RopeStyle, head_dim: int) -> Rope:
        """The rotation of heads of `head_dim` elements."""
        base = self.positive("rope.freq_base", 10_000.0)
        if base <= 1:
            self.file.fail(f"{self.name('rope.freq_base')}: is {base:g}, expected more than 1")
        dim = self._rope_dim(head_dim)
        return Rope(
            style=style,
            dim=dim,
            base=base,
            scaling=self._rope_scaling(),
            divisors=self._rope_divisors(dim // 2),
        )

    def _same_in_all_layers(self, key: str, layers: int) -> int | None:
        """A size that may be given once or per layer; None where the key lacks."""
        file, name = self.file, self.name(key)
        if not file.is_array(name):
            return file.integer(name, minimum=1, maximum=_MAX_SIZE, default=None)
        given = file.integers(name)
        if len(given) != layers:
            file.fail(f"{name}: has {len(given)} entries for {layers} layers")
        sizes = set(given)
        if len(sizes) != 1:
            file.fail(f"{name}: layers of different sizes are not supported")
        value = sizes.pop()
        if not 1 <= value <= _MAX_SIZE:
            file.fail(f"{name}: is {value}, expected 1 to {_MAX_SIZE}")
        return value

    def _head_dim(self, width: int, heads: int) -> int:
        file, name = self.file, self.name("attention.key_length")
        head_dim = file.integer(name, minimum=1, maximum=_MAX_SIZE, default=None)
        if head_dim is None:
            if width % heads:
                file.fail(f"{name}: is missing, and a width of {width} is not a multiple of {heads} heads")
            head_dim = width // heads
        value_length = file.integer(self.name("attention.value_length"), default=head_dim)
        if value_length != head_dim:
            file.fail(
                f"{self.name('attention.value_length')}: {value_length} differs from the keys' {head_dim}, "
                "which is not supported"
            )
        return head_dim

    def _rows(self, tensor: str) -> int:
        info = self.file.tensors.get(tensor)
        if info is None:
            self.file.fail(f"tensor {tensor}: is missing")
        if len(info.shape) != 2:
            self.file.fail(f"tensor {tensor}: has shape {info.shape}, expected two dimensions")
        return info.shape[0]

    def _rope_dim(self, head_dim: int) -> int:
        name = self.name("rope.dimension_count")
        dim = self.file.integer(name, minimum=1, maximum=_MAX_SIZE, default=head_dim)
        if dim != head_dim:
            self.file.fail(f"{name}: rotating {dim} of {head_dim} elements of a head is not supported")
        if dim % 2:
            self.file.fail(f"{name}: a head of {dim} elements has no pairs to rotate")
        return dim

    def _rope_divisors(self, pairs: int) -> tuple[float, ...]:
        info = self.file.tensors.get(ROPE_DIVISORS)
        if info is None:
            return ()
        if info.shape != (pairs,):
            self.file.fail(f"tensor {ROPE_DIVISORS}: has shape {info.shape}, expected {(pairs,)}")
        divisors = self.file.array(ROPE_DIVISORS)
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            self.file.fail(f"tensor {ROPE_DIVISORS}: holds a divisor that is not a positive number")
        return tuple(divisors.tolist())

    def _rope_scaling(self) -> RopeScaling:
        # llama.cpp's reading: a factor without a type is linear; `scale_linear` is the factor's old name.
        file, kind_key = self.file, self.name("rope.scaling.type")
        kind = file.string(kind_key, default="linear")
        if kind not in ("none", "linear", "yarn"):
            file.fail(f"{kind_key}: {kind!r} is not supported; supported are none, linear, yarn")
        factor_key = self.name("rope.scaling.factor")
        if factor_key not in file:
            factor_key = self.name("rope.scale_linear")
        # 0 is how files spell "unset".
        factor = file.number(factor_key, default=0.0) or 1.0
        if factor <= 0:
            file.fail(f"{factor_key}: is {factor:g}, expected more than 0")
        if kind == "linear" and factor == 1.0:
            kind = "none"
        return RopeScaling(
            kind=cast(Literal["none", "linear", "yarn"], kind),
            factor=factor if kind != "none" else 1.0,
            attention_factor=self.positive("rope.scaling.attn_factor", 1.0),
            original_context=file.integer(
                self.name("rope.scaling.original_context_length"),
                minimum=1,
                maximum=2**31,
                default=self.size("context_length"),
            ),
            beta_fast=self.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.positive("rope.scaling.yarn_beta_slow", 1.0),
        )
