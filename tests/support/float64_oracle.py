"""The oracle of runners: a model in float64 over a whole sequence, formula by formula.

Without cache, pages, stacked matrices, or anything of a runner.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    Experts,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    Mixer,
    ModelSpec,
    Norm,
    RouterScores,
)

Wide = npt.NDArray[np.float64]


def straightforward_logits(file: GgufFile, spec: ModelSpec, tokens: list[int]) -> Wide:
    """Logits (T, vocab) after each of the tokens (T,)."""
    x = _array(file, "token_embd.weight")[tokens] * spec.embedding_scale
    rows = _inputs_of_layers(file, spec, tokens, x)
    kept: dict[int, tuple[Wide, Wide]] = {}
    for index, layer in enumerate(spec.layers):
        block = f"blk.{index}."
        if layer.mixer is not None:
            normed = _normed(file, layer.attention_norm, block + "attn_norm", x)
            added = _mixed(file, layer.mixer, block, normed, kept)
            added = _normed(file, layer.attention_post_norm, block + "post_attention_norm", added)
            x = x + layer.residual_scale * added
        if not layer.feed_forward.width:
            continue
        if not layer.parallel:
            normed = _normed(file, layer.feed_forward_norm, block + layer.feed_forward_norm_name, x)
        network = layer.feed_forward
        if not isinstance(network, Experts):
            added = _feed_forward(file, network, block, normed)
        elif network.beside is None:
            added = _experts(file, network, block, normed, normed)
        else:
            added = _experts_beside(file, network, network.beside, block, normed, x)
        added = _normed(file, layer.feed_forward_post_norm, block + "post_ffw_norm", added)
        x = x + layer.residual_scale * added
        if layer.inputs is not None:
            gate = _activated(layer.inputs.activation, _linear(file, block + "inp_gate", x, False))
            added = _linear(file, block + "proj", gate * rows[:, index], False)
            x = x + _normed(file, layer.inputs.norm, block + "post_norm", added)
        if layer.output_scale:
            x = x * _array(file, block + "layer_output_scale.weight")
    head = _array(file, "token_embd.weight" if spec.tied_head else "output.weight")
    logits = _normed(file, spec.output_norm, "output_norm", x) @ head.T * spec.logit_scale
    cap = spec.logit_softcap
    return logits if cap is None else cap * np.tanh(logits / cap)


def _inputs_of_layers(file: GgufFile, spec: ModelSpec, tokens: list[int], x: Wide) -> Wide:
    """(T, layers, columns)"""
    inputs = spec.layers[0].inputs
    if inputs is None:
        return x
    shape = (len(tokens), len(spec.layers), inputs.width)
    looked_up = _array(file, "per_layer_token_embd.weight")[tokens].reshape(shape) * np.sqrt(inputs.width)
    made = _linear(file, "per_layer_model_proj", x, False).reshape(shape) / np.sqrt(spec.width)
    return (_normed(file, inputs.norm, "per_layer_proj_norm", made) + looked_up) / np.sqrt(2)


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


def _mixed(file: GgufFile, mixer: Mixer, block: str, x: Wide, kept: dict[int, tuple[Wide, Wide]]) -> Wide:
    if isinstance(mixer, Attention):
        return _attention(file, mixer, block, x, kept)
    if isinstance(mixer, LatentAttention):
        return _latent_attention(file, mixer, block, x)
    if isinstance(mixer, GatedDeltaNet):
        return _delta_net(file, mixer, block, x)
    if isinstance(mixer, Mamba2):
        return _mamba2(file, mixer, block, x)
    b, c, inner = np.split(_linear(file, block + "shortconv.in_proj", x, False), 3, axis=1)
    mixed = c * _convolved(_array(file, block + "shortconv.conv.weight"), b * inner)
    return _linear(file, block + "shortconv.out_proj", mixed, False)


def _convolved(weight: Wide, x: Wide) -> Wide:
    kernel = weight.shape[1]
    padded = np.concatenate([np.zeros((kernel - 1, x.shape[1])), x])
    return np.array([(padded[t : t + kernel] * weight.T).sum(0) for t in range(len(x))])


def _silu(x: Wide) -> Wide:
    return x / (1 + np.exp(-x))


def _delta_net(file: GgufFile, net: GatedDeltaNet, block: str, x: Wide) -> Wide:
    qkv = _linear(file, block + "attn_qkv", x, False)
    qkv = _silu(_convolved(_array(file, block + "ssm_conv1d.weight"), qkv))
    keys = net.key_heads * net.key_dim
    beta = 1 / (1 + np.exp(-_linear(file, block + "ssm_beta", x, False)))
    step = np.log(
        1 + np.exp(_linear(file, block + "ssm_alpha", x, False) + _array(file, block + "ssm_dt.bias"))
    )
    kept = np.exp(_array(file, block + "ssm_a") * step)
    outputs = []
    for head in range(net.value_heads):
        first = head % net.key_heads * net.key_dim
        q, k = (qkv[:, start + first : start + first + net.key_dim] for start in (0, keys))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        v = qkv[:, 2 * keys + head * net.value_dim : 2 * keys + (head + 1) * net.value_dim]
        state, rows = np.zeros((net.key_dim, net.value_dim)), []
        for t in range(len(x)):
            state = kept[t, head] * state
            state = state + beta[t, head] * np.outer(k[t], v[t] - state.T @ k[t])
            rows.append(state.T @ q[t] / np.sqrt(net.key_dim))
        outputs.append(_normed(file, net.norm, block + "ssm_norm", np.array(rows)))
    gated = np.concatenate(outputs, axis=1) * _silu(_linear(file, block + "attn_gate", x, False))
    return _linear(file, block + "ssm_out", gated, False)


def _mamba2(file: GgufFile, mamba: Mamba2, block: str, x: Wide) -> Wide:
    inner, shared, size = mamba.heads * mamba.head_dim, mamba.groups * mamba.state_size, mamba.state_size
    gate, convolved, step = np.split(
        _linear(file, block + "ssm_in", x, False), [inner, 2 * inner + 2 * shared], axis=1
    )
    convolved = _convolved(_array(file, block + "ssm_conv1d.weight"), convolved)
    if mamba.convolution_bias:
        convolved = convolved + _array(file, block + "ssm_conv1d.bias")
    convolved = _silu(convolved)
    step = np.log(1 + np.exp(step + _array(file, block + "ssm_dt.bias")))
    decays, skips = (_array(file, block + name)[:, 0] for name in ("ssm_a", "ssm_d"))
    outputs = []
    for head in range(mamba.heads):
        group = head // (mamba.heads // mamba.groups)
        own = convolved[:, head * mamba.head_dim : (head + 1) * mamba.head_dim]
        b, c = (
            convolved[:, start + group * size : start + (group + 1) * size]
            for start in (inner, inner + shared)
        )
        state, rows = np.zeros((mamba.head_dim, size)), []
        for t in range(len(x)):
            state = np.exp(step[t, head] * decays[head]) * state + step[t, head] * np.outer(own[t], b[t])
            rows.append(state @ c[t] + skips[head] * own[t])
        outputs.append(np.array(rows))
    gated = (np.concatenate(outputs, axis=1) * _silu(gate)).reshape(len(x), mamba.groups, -1)
    return _linear(
        file,
        block + "ssm_out",
        _normed(file, mamba.norm, block + "ssm_norm", gated).reshape(len(x), -1),
        False,
    )


def _attention(
    file: GgufFile, attention: Attention, block: str, x: Wide, kept: dict[int, tuple[Wide, Wide]]
) -> Wide:
    """Layers leave their keys and values, before norms and rotation, to those that read them."""
    size, heads, kv_heads = attention.head_dim, attention.heads, attention.kv_heads
    if attention.fused:
        whole = _linear(file, block + "attn_qkv", x, attention.bias)
        q, k, v = np.split(whole, [heads * size, (heads + kv_heads) * size], axis=1)
    elif attention.keys_of is not None:
        q = _linear(file, f"{block}attn_q", x, attention.bias)
        k, v = kept[attention.keys_of]
    else:
        own = "qkk" if attention.values_are_keys else "qkv"
        q, k, v = (_linear(file, f"{block}attn_{part}", x, attention.bias) for part in own)
    kept[int(block.split(".")[1])] = k, v
    keys_block = block if attention.keys_of is None else f"blk.{attention.keys_of}."
    gates = np.ones(1)
    if attention.gated:
        both = q.reshape(len(x), heads, 2, size)
        q, gates = (both[:, :, part].reshape(len(x), -1) for part in (0, 1))
        gates = 1 / (1 + np.exp(-gates))
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
        if attention.value_norm is not None:
            of_v = of_v / np.sqrt((of_v * of_v).mean(-1, keepdims=True) + attention.value_norm.eps)
        norms = (block + "attn_q_norm", of_q), (keys_block + "attn_k_norm", of_k)
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
        if attention.sinks:
            sink = np.full((len(x), 1), _array(file, block + "attn_sinks.weight")[head])
            scores, of_v = np.concatenate([scores, sink], axis=1), np.concatenate([of_v, np.zeros((1, size))])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(weights / weights.sum(-1, keepdims=True) @ of_v)
    mixed = np.concatenate(outputs, axis=1) * gates
    return _linear(file, block + "attn_output", mixed, attention.output_bias)


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


def _latent_attention(file: GgufFile, mixer: LatentAttention, block: str, x: Wide) -> Wide:
    """Keys and values made for each head, as the paper has it at first."""
    heads, nope, values = mixer.heads, mixer.key_dim, mixer.value_dim
    if mixer.query_latent is None:
        q = _linear(file, block + "attn_q", x, False)
    else:
        inner = _normed(
            file, mixer.norm, block + "attn_q_a_norm", _linear(file, block + "attn_q_a", x, False)
        )
        q = _linear(file, block + "attn_q_b", inner, False)
    latent, rotated = np.split(_linear(file, block + "attn_kv_a_mqa", x, False), [mixer.latent], axis=1)
    latent = _normed(file, mixer.norm, block + "attn_kv_a_norm", latent)
    rotated = _rotated(mixer.rope, rotated)
    if mixer.fused:
        made = _linear(file, block + "attn_kv_b", latent, False).reshape(len(x), heads, nope + values)
        k, v = made[:, :, :nope], made[:, :, nope:]
    else:
        k = np.einsum("tl,hlk->thk", latent, _array(file, block + "attn_k_b.weight"))
        v = np.einsum("tl,hvl->thv", latent, _array(file, block + "attn_v_b.weight"))
    place, outputs = np.arange(len(x)), []
    for head in range(heads):
        own = q.reshape(len(x), heads, -1)[:, head]
        scores = own[:, :nope] @ k[:, head].T + _rotated(mixer.rope, own[:, nope:]) @ rotated.T
        scores = np.where(place[None, :] <= place[:, None], scores * mixer.scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, head])
    return _linear(file, block + "attn_output", np.concatenate(outputs, axis=1), False)


def _experts_beside(file: GgufFile, experts: Experts, norm: Norm, block: str, normed: Wide, x: Wide) -> Wide:
    """Two branches, each with norms of its own, of the residual stream x."""
    routing = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)
    routing = routing * _array(file, block + "ffn_gate_inp.scale") / np.sqrt(x.shape[1])
    read = _normed(file, norm, block + "pre_ffw_norm_2", x)
    routed = _experts(file, replace(experts, shared=None), block, read, routing)
    assert experts.shared is not None
    dense = _feed_forward(file, experts.shared, block, normed)
    return _normed(file, norm, block + "post_ffw_norm_1", dense) + _normed(
        file, norm, block + "post_ffw_norm_2", routed
    )


def _experts(file: GgufFile, experts: Experts, block: str, x: Wide, routing: Wide) -> Wide:
    """Token by token; the router reads `routing`."""
    logits = _linear(file, block + "ffn_gate_inp", routing, experts.router_bias)
    bias = _array(file, block + "exp_probs_b.bias") if experts.selection_bias else 0
    read = x if experts.latent is None else _linear(file, block + "ffn_latent_down", x, False)
    added = np.zeros_like(read)
    for token, row in enumerate(logits):
        shares = {
            RouterScores.SOFTMAX: np.exp(row) / np.exp(row).sum(),
            RouterScores.SIGMOID: 1 / (1 + np.exp(-row)),
            RouterScores.SOFTMAX_OF_CHOSEN: row,
        }[experts.scores]  # fmt: skip
        by = (shares + bias).reshape(experts.groups, -1)
        if experts.groups > 1:
            good = [sum(sorted(group)[-experts.group_best :]) for group in by.tolist()]
            for group in np.argsort(good)[: experts.groups - experts.groups_used]:
                by[group] = -np.inf
        chosen = sorted(range(experts.count), key=lambda one: (-by.reshape(-1)[one], one))[: experts.used]
        taken = shares[chosen]
        if experts.scores is RouterScores.SOFTMAX_OF_CHOSEN:
            taken = np.exp(taken) / np.exp(taken).sum()
        if experts.normalise:
            taken = taken / taken.sum()
        for expert, share in zip(chosen, taken * experts.scale, strict=True):
            added[token] += share * _expert(file, experts, block, read[token], expert)
    if experts.latent is not None:
        added = _linear(file, block + "ffn_latent_up", added, False)
    if experts.shared is None:
        return added
    shared = _feed_forward(file, experts.shared, block, x, suffix="_shexp")
    if experts.shared_gated:
        gate = (x * _array(file, block + "ffn_gate_inp_shexp.weight")).sum(1, keepdims=True)
        shared = shared / (1 + np.exp(-gate))
    return added + shared


def _expert(file: GgufFile, experts: Experts, block: str, x: Wide, expert: int) -> Wide:
    def product(part: str, x: Wide) -> Wide:
        y: Wide = _array(file, f"{block}ffn_{part}_exps.weight")[expert] @ x
        if part in experts.expert_scales:
            y = y * _array(file, f"{block}ffn_{part}_exps.scale")[expert]
        return y + _array(file, f"{block}ffn_{part}_exps.bias")[expert] if experts.bias else y

    if experts.fused:
        gate, up = np.split(product("gate_up", x), 2)
    else:
        gate, up = product("gate", x) if experts.gated else None, product("up", x)
    if gate is None:
        inner = _activated(experts.activation, up)
    elif experts.activation is Activation.CLAMPED_SWIGLU:
        gate = np.minimum(gate, 7)
        inner = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)
    else:
        inner = _activated(experts.activation, gate) * up
    return product("down", inner)


def _feed_forward(
    file: GgufFile, feed_forward: FeedForward, block: str, x: Wide, *, suffix: str = ""
) -> Wide:
    up = _linear(file, f"{block}ffn_up{suffix}", x, feed_forward.bias)
    if not feed_forward.gated:
        inner = _activated(feed_forward.activation, up)
    else:
        if feed_forward.fused:
            gate, up = np.split(up, 2, axis=1)
        else:
            gate = _linear(file, f"{block}ffn_gate{suffix}", x, feed_forward.bias)
        inner = _activated(feed_forward.activation, gate) * up
    return _linear(file, f"{block}ffn_down{suffix}", inner, feed_forward.bias)


def _activated(activation: Activation, x: Wide) -> Wide:
    if activation is Activation.SILU:
        return _silu(x)
    if activation is Activation.RELU_SQUARED:
        return np.maximum(x, 0) ** 2
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
