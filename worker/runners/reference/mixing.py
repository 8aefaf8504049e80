"""Layers that mix tokens by a state, between the product of their input and that of their output."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.spec import GatedDeltaNet, Mamba2, Role, ShortConv
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.recurrences import (
    causal_convolution,
    delta_chunked,
    delta_recurrent,
    mamba2_chunked,
    mamba2_recurrent,
)
from nightmill.worker.runners.reference.states import Flow

__all__ = ["mix"]

FloatArray = ops.FloatArray
Weights = dict[Role, npt.NDArray[np.float32]]
State = dict[str, FloatArray]
Form = Callable[..., FloatArray]

_LEAST_LENGTH = 1e-6
"""Added to the square of a key's or query's length before these are divided by it."""


def mix(
    mixer: GatedDeltaNet | Mamba2 | ShortConv, weights: Weights, x: FloatArray, state: State, flow: Flow
) -> FloatArray:
    """Mix T tokens by a layer's states, by slot, which are updated.

    x (T, rows of MIXER_INPUT) is the product of the layer's input; returns (T, columns of MIXER_OUTPUT).
    """
    if isinstance(mixer, GatedDeltaNet):
        return _delta_net(mixer, weights, x, state, flow)
    if isinstance(mixer, Mamba2):
        return _mamba2(mixer, weights, x, state, flow)
    b, c, inner = np.split(x, 3, axis=1)
    return c * _convolved(b * inner, weights, state, flow)


def _delta_net(mixer: GatedDeltaNet, weights: Weights, x: FloatArray, state: State, flow: Flow) -> FloatArray:
    kind, tokens = x.dtype.type, len(x)
    values, heads = mixer.values, mixer.value_heads
    qkv, gate, beta, alpha = np.split(x, np.cumsum([mixer.convolved, values, heads]), axis=1)
    if mixer.by_key_head:
        both = np.concatenate([beta, alpha], axis=1).reshape(tokens, mixer.key_heads, 2, -1)
        beta, alpha = (both[:, :, part].reshape(tokens, heads) for part in (0, 1))
    qkv = ops.silu(_convolved(qkv, weights, state, flow))
    q, k, v = np.split(qkv, [mixer.keys, 2 * mixer.keys], axis=1)
    q, k = (_of_length_1(part.reshape(tokens, -1, mixer.key_dim)) for part in (q, k))
    q, k, sharing = q * kind(mixer.key_dim**-0.5), k, heads // mixer.key_heads
    if mixer.by_key_head:
        q, k = (np.repeat(part, sharing, axis=1) for part in (q, k))
    else:
        q, k = (np.tile(part, (1, sharing, 1)) for part in (q, k))
    decay = weights[Role.DECAY] * np.logaddexp(alpha + weights[Role.TIME_STEP_BIAS], kind(0))
    inputs = (q, k, v.reshape(tokens, heads, -1), decay, ops.sigmoid(beta))
    mixed = _through(delta_chunked, delta_recurrent, inputs, state, flow)
    normed = ops.rms_norm(mixed, weights[Role.MIXER_NORM], mixer.norm.eps)
    return normed.reshape(tokens, -1) * ops.silu(gate)


def _mamba2(mixer: Mamba2, weights: Weights, x: FloatArray, state: State, flow: Flow) -> FloatArray:
    kind, tokens, heads = x.dtype.type, len(x), mixer.heads
    gate, convolved, step = np.split(x, np.cumsum([mixer.inner, mixer.convolved]), axis=1)
    convolved = _convolved(convolved, weights, state, flow)
    if mixer.convolution_bias:
        convolved = convolved + weights[Role.CONVOLUTION_BIAS]
    inner, b, c = np.split(ops.silu(convolved), [mixer.inner, mixer.inner + mixer.shared], axis=1)
    inner = inner.reshape(tokens, heads, -1)
    b, c = (part.reshape(tokens, mixer.groups, -1) for part in (b, c))
    step = np.logaddexp(step + weights[Role.TIME_STEP_BIAS], kind(0))
    inputs = (inner, b, c, step, step * weights[Role.DECAY][:, 0])
    mixed = _through(mamba2_chunked, mamba2_recurrent, inputs, state, flow) + inner * weights[Role.SKIP]
    gated = (mixed.reshape(tokens, -1) * ops.silu(gate)).reshape(tokens, mixer.groups, -1)
    return ops.rms_norm(gated, weights[Role.MIXER_NORM], mixer.norm.eps).reshape(tokens, -1)


def _convolved(x: FloatArray, weights: Weights, state: State, flow: Flow) -> FloatArray:
    """The causal convolution of x (T, C)."""
    before, weight, result = state["inputs"], weights[Role.CONVOLUTION], np.empty_like(x)
    for part, slot in flow.pieces:
        result[part] = causal_convolution(x[part], before[slot], weight)
    for rows, slots in flow.rounds:
        taken = before[slots]
        result[rows] = causal_convolution(x[rows, None], taken, weight)[:, 0]
        before[slots] = taken
    return result


def _through(
    chunked: Form, recurrent: Form, inputs: tuple[FloatArray, ...], state: State, flow: Flow
) -> FloatArray:
    """Take inputs, (T, ...) each, through the states: prompts in the one form, drawn tokens in the other."""
    matrices = state["matrix"]
    result = np.empty((len(inputs[0]), matrices.shape[1], matrices.shape[3]), dtype=matrices.dtype)
    for part, slot in flow.pieces:
        result[part] = chunked(*(one[part] for one in inputs), matrices[slot])
    for rows, slots in flow.rounds:
        taken = matrices[slots]
        result[rows] = recurrent(*(one[rows] for one in inputs), taken)
        matrices[slots] = taken
    return result


def _of_length_1(x: FloatArray) -> FloatArray:
    """x (..., D) divided by its length."""
    squares = np.square(x).sum(axis=-1, keepdims=True)
    divided: FloatArray = x / np.sqrt(squares + x.dtype.type(_LEAST_LENGTH))
    return divided
