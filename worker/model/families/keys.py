"""A family's metadata, read as the parts of a spec: each reader checks what it reads.

Readers raise ModelFileError, which names the key or tensor at fault.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, cast

import numpy as np

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import Activation, Attention, FeedForward, Norm

__all__ = ["ROPE_DIVISORS", "Keys"]

ROPE_DIVISORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that divide the rotation's frequencies: always, within the original context, and past it."""

# Keys that change the arithmetic, with the value (besides absence) at which they do not. A file with another
# value is refused, but for the keys that its family reads.
_OTHER_ARITHMETIC: Final[dict[str, float]] = {
    "expert_count": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.temperature_scale": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "rope.scaling.alpha": 0,
    "rope.scaling.yarn_ext_factor": 1,
}
_MAX_SIZE: Final = 1 << 24  # of any one dimension


class Keys:
    """The keys under a family's name, and the tensors beside them."""

    def __init__(self, file: GgufFile, family: str) -> None:
        self.file = file
        self.family = family
        self.skipped_blocks = 0  # at the end: no layers
        self._read: set[str] = set()
        self._left_out: list[str] = []

    def name(self, key: str) -> str:
        """The whole key, as messages show it."""
        return f"{self.family}.{key}"

    def size(self, key: str) -> int:
        """A dimension of something, which must be given."""
        return self.file.integer(self.name(key), minimum=1, maximum=_MAX_SIZE)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number over 0; without a default it must be given."""
        self._read.add(key)
        name = self.name(key)
        value = self.file.number(name) if default is None else self.file.number(name, default=default)
        if value <= 0:
            self.file.fail(f"{name}: is {value:g}, expected more than 0")
        return value

    def optional(self, key: str, default: float | None = None) -> float | None:
        """A number over 0, `default` where the key lacks; None where it says 0: files spell "unset" so."""
        self._read.add(key)
        name = self.name(key)
        value = self.file.number(name, default=default)
        if value is not None and value < 0:
            self.file.fail(f"{name}: is {value:g}, expected more than 0")
        return value or None

    def reads(self, key: str) -> None:
        """Say that the family reads a key that would change the arithmetic if it did not."""
        self._read.add(key)

    def has_tensor(self, name: str) -> bool:
        """Return whether the file holds a tensor of that name."""
        return name in self.file.tensors

    def refuse_other_arithmetic(self) -> None:
        """Fail where a key that nobody has read asks for what is not plain."""
        file = self.file
        for key, neutral in _OTHER_ARITHMETIC.items():
            value = neutral if key in self._read else file.number(self.name(key), default=neutral)
            if value != neutral:
                file.fail(f"{self.name(key)}: {value:g} asks for arithmetic that is not supported")
        causal = "attention.causal"
        if causal not in self._read and not file.boolean(self.name(causal), default=True):
            file.fail(f"{self.name(causal)}: encoders of this family are not supported")
        sections = "rope.dimension_sections"
        if sections not in self._read and file.is_array(self.name(sections)):
            file.fail(f"{self.name(sections)}: the rotation of images is not supported")
        if "attention.sliding_window" not in self._read and self.window_in_context() is not None:
            file.fail(f"{self.name('attention.sliding_window')}: sliding-window attention is not supported")

    def block_count(self) -> int:
        """The number of layers."""
        return self._blocks() - self.skipped_blocks

    def _blocks(self) -> int:
        return self.file.integer(self.name("block_count"), minimum=1, maximum=4096)

    def skip_predictors(self) -> None:
        """Take the last blocks for what they are if the file says so: they predict further tokens (MTP)."""
        name, blocks = self.name("nextn_predict_layers"), self._blocks()
        self.skipped_blocks = self.file.integer(name, minimum=0, maximum=blocks - 1, default=0)

    def leave_out(self, *prefixes: str) -> None:
        """Say that tensors whose names begin so are not used, if the file holds such."""
        self._left_out += prefixes

    @property
    def skipped(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors that are not part of the model's layers."""
        first = self.block_count()
        blocks = (f"blk.{index}." for index in range(first, first + self.skipped_blocks))
        return (*blocks, *self._left_out)

    def by_layer(self, key: str) -> list[int]:
        """A size of each layer, 0 where it has none; the file gives one for all, or each."""
        file, name, layers = self.file, self.name(key), self.block_count()
        if not file.is_array(name):
            return [file.integer(name, minimum=0, maximum=_MAX_SIZE)] * layers
        given = file.integers(name)
        if len(given) != self._blocks():
            file.fail(f"{name}: has {len(given)} entries for {self._blocks()} layers")
        if (wrong := next((size for size in given if not 0 <= size <= _MAX_SIZE), None)) is not None:
            file.fail(f"{name}: is {wrong}, expected 0 to {_MAX_SIZE}")
        return given[:layers]

    @property
    def has_experts(self) -> bool:
        """True if the file has mixtures of experts."""
        return self.file.integer(self.name("expert_count"), minimum=0, default=0) > 0

    def refuse_experts(self) -> None:
        """Fail where the file has experts: families that call it are those without."""
        name = self.name("expert_count")
        if count := self.file.integer(name, default=0):
            self.file.fail(
                f"{name}: {count} experts; this family has none, those with experts have other names"
            )

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

    def suppressed(self, vocab: int) -> tuple[int, ...]:
        """Tokens that are never drawn, of a vocabulary of so many."""
        file, name = self.file, "tokenizer.ggml.suppress_tokens"
        given = file.integers(name, default=[])
        if (wrong := next((token for token in given if not 0 <= token < vocab), None)) is not None:
            file.fail(f"{name}: token {wrong} is not one of the vocabulary's {vocab}")
        if len(set(given)) == vocab:
            file.fail(f"{name}: names all tokens, so that none can be drawn")
        return tuple(sorted(set(given)))

    def norm(self) -> Norm:
        """The RMS norm that all places of most families have."""
        return Norm(self.positive("attention.layer_norm_rms_epsilon"))

    def layer_norm(self) -> Norm:
        """The LayerNorm that all places of some families have, with biases if the file holds them."""
        eps = self.positive("attention.layer_norm_epsilon")
        return Norm(eps, centred=True, bias=self.has_tensor("blk.0.attn_norm.bias"))

    def window(self, default: int = 0) -> int | None:
        """Tokens that layers with a sliding window see; None where there are no such layers."""
        self._read.add("attention.sliding_window")
        name = self.name("attention.sliding_window")
        return self.file.integer(name, minimum=0, maximum=2**31, default=default) or None

    def window_in_context(self) -> int | None:
        """The window of a file whose layers all have one; None if it hides nothing of the context."""
        window = self.window()
        return window if window is not None and window < self.size("context_length") else None

    def windowed_layers(self, period: int) -> list[bool]:
        """Which layers have a sliding window: all but each `period`-th, if the file does not say it."""
        file, layers, name = self.file, self.block_count(), self.name("attention.sliding_window_pattern")
        if not file.is_array(name):
            period = file.integer(name, minimum=1, maximum=_MAX_SIZE, default=period)
            return [(index + 1) % period != 0 for index in range(layers)]
        given = file.booleans(name)
        if len(given) != layers:
            file.fail(f"{name}: has {len(given)} entries for {layers} layers")
        return given

    def text_of_images(self) -> None:
        """Take the rotation of a model of images too: where all is text, a token has one position."""
        self._read.add("rope.dimension_sections")

    def attention(
        self, style: RopeStyle, *, bias: bool | None = None, qk_norm: Norm | None = None,
        layers: Sequence[int] | None = None, rope: Rope | None = None, local: bool = False,
    ) -> Attention:  # fmt: skip
        """Attention that is the same in `layers`, in all by default.

        bias   of queries, keys and values; None: as the file
        rope   None: as the keys say
        local  its heads are of the size that layers with a window have, and its rotation is theirs
        """
        width, block = self.size("embedding_length"), f"blk.{layers[0] if layers else 0}."
        heads = self._same("attention.head_count", layers)
        if heads is None:
            self.file.fail(f"{self.name('attention.head_count')}: the key is missing")
        kv_heads = self._same("attention.head_count_kv", layers)
        if kv_heads is None:
            kv_heads = heads
        if heads % kv_heads:
            self.file.fail(
                f"{self.name('attention.head_count_kv')}: {kv_heads} does not divide {heads} heads"
            )
        head_dim = self._head_dim(width, heads, "_swa" if local else "")
        fused = self.has_tensor(f"{block}attn_qkv.weight")
        if bias is None:
            bias = self.has_tensor(f"{block}attn_qkv.bias" if fused else f"{block}attn_q.bias")
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope or (self._rope_of_window if local else self.rope)(style, head_dim),
            bias=bias,
            output_bias=self.has_tensor(f"{block}attn_output.bias"),
            fused=fused,
            qk_norm=qk_norm,
        )

    def feed_forward(
        self, *, activation: Activation = Activation.SILU, gated: bool = True, fused: bool = False,
        layers: Sequence[int] | None = None,
    ) -> FeedForward:  # fmt: skip
        """A feed-forward network that is the same in `layers`, in all by default.

        fused  gate and up are one tensor
        """
        up = f"blk.{layers[0] if layers else 0}.ffn_up"
        rows = self._rows(f"{up}.weight")
        width = rows // 2 if fused else rows
        declared = self._same("feed_forward_length", layers)
        if declared not in (None, width):
            self.file.fail(
                f"{self.name('feed_forward_length')}: is {declared}, but {up}.weight has {rows} rows"
            )
        bias = self.has_tensor(f"{up}.bias")
        return FeedForward(width=width, activation=activation, gated=gated, bias=bias, fused=fused)

    def rope(self, style: RopeStyle, head_dim: int) -> Rope:
        """The rotation of heads of `head_dim` elements."""
        base = self.positive("rope.freq_base", 10_000.0)
        if base <= 1:
            self.file.fail(f"{self.name('rope.freq_base')}: is {base:g}, expected more than 1")
        dim, scaling = self._rope_dim(head_dim), self._rope_scaling()
        return Rope(
            style=style, dim=dim, base=base, scaling=scaling, divisors=self._rope_divisors(dim // 2, scaling)
        )

    def no_rope(self, style: RopeStyle) -> Rope:
        """The rotation of layers in which positions do not count."""
        return Rope(style=style, dim=0, base=self.positive("rope.freq_base", 10_000.0))

    def _rope_of_window(self, style: RopeStyle, head_dim: int) -> Rope:
        """The rotation in layers with a window whose heads have a size of their own."""
        dim = self._rope_dim(head_dim, "_swa")
        return Rope(style=style, dim=dim, base=self.positive("rope.freq_base_swa", 10_000.0))

    def local_rope(self, rope: Rope, base: float) -> Rope:
        """The rotation in layers with a sliding window, where positions are not stretched."""
        base = self.positive("rope.freq_base_swa", base)
        return replace(rope, base=base, scaling=RopeScaling(), divisors=())

    def _same(self, key: str, layers: Sequence[int] | None) -> int | None:
        """A size that may be given once or per layer, of `layers` or of all; None where the key lacks."""
        file, name = self.file, self.name(key)
        if not file.is_array(name):
            return file.integer(name, minimum=1, maximum=_MAX_SIZE, default=None)
        given = file.integers(name)
        if len(given) != self._blocks():
            file.fail(f"{name}: has {len(given)} entries for {self._blocks()} layers")
        sizes = {given[index] for index in (range(self.block_count()) if layers is None else layers)}
        if len(sizes) != 1:
            file.fail(f"{name}: layers of different sizes are not supported")
        value = sizes.pop()
        if not 1 <= value <= _MAX_SIZE:
            file.fail(f"{name}: is {value}, expected 1 to {_MAX_SIZE}")
        return value

    def _head_dim(self, width: int, heads: int, suffix: str) -> int:
        file, name = self.file, self.name(f"attention.key_length{suffix}")
        head_dim = file.integer(name, minimum=1, maximum=_MAX_SIZE, default=None)
        if head_dim is None:
            if suffix:
                file.fail(f"{name}: the key is missing: layers with a window have heads of their own size")
            if width % heads:
                file.fail(f"{name}: is missing, and a width of {width} is not a multiple of {heads} heads")
            head_dim = width // heads
        values = self.name(f"attention.value_length{suffix}")
        value_length = file.integer(values, default=head_dim)
        if value_length != head_dim:
            file.fail(f"{values}: {value_length} differs from the keys' {head_dim}, which is not supported")
        return head_dim

    def rows(self, tensor: str) -> int:
        """The rows of a table, which must be there."""
        return self._rows(tensor)

    def _rows(self, tensor: str) -> int:
        info = self.file.tensors.get(tensor)
        if info is None:
            self.file.fail(f"tensor {tensor}: is missing")
        if len(info.shape) != 2:
            self.file.fail(f"tensor {tensor}: has shape {info.shape}, expected two dimensions")
        return info.shape[0]

    def _rope_dim(self, head_dim: int, suffix: str = "") -> int:
        name = self.name(f"rope.dimension_count{suffix}")
        dim = self.file.integer(name, minimum=1, maximum=head_dim, default=head_dim)
        if dim % 2:
            self.file.fail(f"{name}: {dim} elements are not pairs to rotate")
        return dim

    def _rope_divisors(self, pairs: int, scaling: RopeScaling) -> tuple[float, ...]:
        """One set for all texts: the long one if the file's context is longer than the original one.

        Choosing by each text's length would change what the tokens cached so far should have been.
        """
        always, short, long = ROPE_DIVISORS
        stretched = self.size("context_length") > scaling.original_context
        name = always if self.has_tensor(always) else long if stretched else short
        info = self.file.tensors.get(name)
        if info is None:
            return ()
        if info.shape != (pairs,):
            self.file.fail(f"tensor {name}: has shape {info.shape}, expected {(pairs,)}")
        divisors = self.file.array(name)
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            self.file.fail(f"tensor {name}: holds a divisor that is not a positive number")
        return tuple(divisors.tolist())

    def _rope_scaling(self) -> RopeScaling:
        # llama.cpp's reading: a factor without a type is linear; `scale_linear` is the factor's old name.
        file, kind_key = self.file, self.name("rope.scaling.type")
        kind = file.string(kind_key, default="linear")
        if kind == "longrope" and self.has_tensor(ROPE_DIVISORS[-1]):
            kind = "none"  # its divisors say it all
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
        log_multiplier = self.optional("rope.scaling.yarn_log_multiplier")
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
            own_magnitude=self.optional("rope.scaling.yarn_attn_factor"),
            log_multiplier=0.0 if log_multiplier is None else log_multiplier,
        )
