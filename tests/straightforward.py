"""The oracle of runners: a model in float64 over a whole sequence, formula by formula.

Without cache, pages, stacked matrices, or anything of a runner.
"""

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import Activation, Attention, FeedForward, ModelSpec, Norm

Wide = npt.NDArray[np.float64]


def straightforward_logits(file: GgufFile, spec: ModelSpec, tokens: list[int]) -> Wide:
    """Logits (T, vocab) after each of the tokens (T,)."""
    x = _array(file, "token_embd.weight")[tokens] * spec.embedding_scale
    for index, layer in enumerate(spec.layers):
        block = f"blk.{index}."
        normed = _normed(file, layer.attention_norm, block + "attn_norm", x)
        added = _attention(file, layer.attention, block, normed)
        added = _normed(file, layer.attention_post_norm, block + "post_attention_norm", added)
        x = x + layer.residual_scale * added
        if not layer.parallel:
            normed = _normed(file, layer.feed_forward_norm, block + layer.feed_forward_norm_name, x)
        added = _feed_forward(file, layer.feed_forward, block, normed)
        added = _normed(file, layer.feed_forward_post_norm, block + "post_ffw_norm", added)
        x = x + layer.residual_scale * added
    head = _array(file, "token_embd.weight" if spec.tied_head else "output.weight")
    logits = _normed(file, spec.output_norm, "output_norm", x) @ head.T * spec.logit_scale
    cap = spec.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)


def _array(file: GgufFile, name: str) -> Wide:
    return file.array(name).astype(np.float64)


def _linear(file: GgufFile, name: str, x: Wide, bias: bool) -> Wide:
    product = x @ _array(file, f"{name}.weight").T
    return product + _array(file, f"{name}.bias") if bias else product


def _normed(file: GgufFile, norm: Norm | None, name: str, x: Wide) -> Wide:
    if norm is None:
        return x
    if norm.centred:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * _array(file, f"{name}.weight")
    return x + _array(file, f"{name}.bias") if norm.bias else x


def _attention(file: GgufFile, attention: Attention, block: str, x: Wide) -> Wide:
    size, heads, kv_heads = attention.head_dim, attention.heads, attention.kv_heads
    if attention.fused:
        whole = _linear(file, block + "attn_qkv", x, attention.bias)
        q, k, v = np.split(whole, [heads * size, (heads + kv_heads) * size], axis=1)
    else:
        q, k, v = (_linear(file, f"{block}attn_{part}", x, attention.bias) for part in "qkv")
    if attention.qk_norm_whole:
        q = _normed(file, attention.qk_norm, block + "attn_q_norm", q)
        k = _normed(file, attention.qk_norm, block + "attn_k_norm", k)
    place = np.arange(len(x))
    seen = place[None, :] <= place[:, None]
    if attention.window is not None:
        seen &= place[:, None] - place[None, :] < attention.window
    outputs = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        of_q, of_k, of_v = (
            part[:, at * size : (at + 1) * size] for part, at in ((q, head), (k, kv), (v, kv))
        )
        norms = (block + "attn_q_norm", of_q), (block + "attn_k_norm", of_k)
        if attention.qk_norm_rotated:
            of_q, of_k = (
                _normed(file, attention.qk_norm, name, _rotated(attention.rope, part)) for name, part in norms
            )
        else:
            norm = None if attention.qk_norm_whole else attention.qk_norm
            of_q, of_k = (_rotated(attention.rope, _normed(file, norm, name, part)) for name, part in norms)
        scale = size**-0.5 if attention.scale is None else attention.scale
        scores = of_q @ of_k.T * scale
        if attention.temperature is not None:
            steps = place // attention.temperature.length
            scores = scores * (1 + attention.temperature.scale * np.log(1 + steps))[:, None]
        if attention.softcap is not None:
            scores = attention.softcap * np.tanh(scores / attention.softcap)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(weights / weights.sum(-1, keepdims=True) @ of_v)
    return _linear(file, block + "attn_output", np.concatenate(outputs, axis=1), attention.output_bias)


def _rotated(rope: Rope, x: Wide) -> Wide:
    turn = np.exp(1j * np.arange(len(x))[:, None] * rope.frequencies()) * rope.magnitude
    part, rest, half = x[:, : rope.dim], x[:, rope.dim :], rope.dim // 2
    if rope.style is RopeStyle.PAIRS:
        turned = (part[:, 0::2] + 1j * part[:, 1::2]) * turn
        part = np.stack([turned.real, turned.imag], axis=-1).reshape(part.shape)
    else:
        turned = (part[:, :half] + 1j * part[:, half:]) * turn
        part = np.concatenate([turned.real, turned.imag], axis=-1)
    return np.concatenate([part, rest], axis=-1)


def _feed_forward(file: GgufFile, feed_forward: FeedForward, block: str, x: Wide) -> Wide:
    up = _linear(file, block + "ffn_up", x, feed_forward.bias)
    if not feed_forward.gated:
        inner = _activated(feed_forward.activation, up)
    else:
        if feed_forward.fused:
            gate, up = np.split(up, 2, axis=1)
        else:
            gate = _linear(file, block + "ffn_gate", x, feed_forward.bias)
        inner = _activated(feed_forward.activation, gate) * up
    return _linear(file, block + "ffn_down", inner, feed_forward.bias)


def _activated(activation: Activation, x: Wide) -> Wide:
    if activation is Activation.SILU:
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
