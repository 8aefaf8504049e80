"""The transformer in NumPy, as a spec says it: weights, and the forward pass over the tokens of a step.

float32 throughout. All tokens of a step go through the matrices together; attention takes the tokens that
were drawn in one piece and every longer chunk by itself, and so do layers with states. The LM head sees only
the rows that draw. A job's tokens do not depend on what else is in the batch (see `ops`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    FeedForward,
    Mixer,
    ModelSpec,
    Norm,
    Role,
    Weight,
)
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.kv_cache import Places, ReferenceKvCache
from nightmill.worker.runners.reference.mixing import mix
from nightmill.worker.runners.reference.rounding import as_fp8
from nightmill.worker.runners.reference.states import Flow, ReferenceStates

__all__ = ["ReferenceModel", "Trace"]

FloatArray = npt.NDArray[np.float32]
Weights = dict[Role, FloatArray]
Rotations = dict[Rope, tuple[ops.FloatArray, ops.FloatArray]]
_ACTIVATIONS = {
    (Activation.SILU, True): ops.swiglu,
    (Activation.SILU, False): ops.silu,
    (Activation.GELU, True): ops.geglu,
    (Activation.GELU, False): ops.gelu,
    (Activation.RELU_SQUARED, True): ops.reglu_squared,
    (Activation.RELU_SQUARED, False): ops.relu_squared,
}
Trace = Callable[[str, npt.NDArray[Any]], None]


class ReferenceModel:
    """A model's weights as float32; computes on a cache and on states.

    trace  called with a name and an array at each stage of a step: "embedding", "layer.0", ..., "norm" (all
           tokens), "logits" (only the rows that draw)
    fp8    round the matrices of layers, and what is multiplied with them, to FP8
    """

    def __init__(
        self, file: GgufFile, spec: ModelSpec, cache: ReferenceKvCache, states: ReferenceStates,
        trace: Trace | None = None, *, fp8: bool = False,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._fp8 = fp8
        self._cache = cache
        self._states = states
        self._trace = trace
        self._layers = [
            _load(file, spec.layer_weights(index), fp8=fp8, controls=layer.controls)
            for index, layer in enumerate(spec.layers)
        ]
        norm = spec.output_norm.weights(Role.OUTPUT_NORM, spec.output_norm_name, spec.width)
        self._output_norm = _load(file, norm)
        self._embedding = file.array("token_embd.weight")
        self._head = (self._embedding if spec.tied_head else file.array("output.weight")).T
        shapes = {
            layer[role].shape: layer[role]
            for index, layer in enumerate(self._layers)
            for role, weight in spec.layer_weights(index).items()
            if weight.is_matrix
        }
        shapes |= {
            one.shape: one for own in self._layers if (one := own.get(Role.MIXER_CONTROLS)) is not None
        }
        self._tiled = not all(map(ops.rows_are_independent, (*shapes.values(), self._head)))
        ropes = {attention.rope for attention in spec.attentions}
        self._frequencies = {rope: rope.frequencies() for rope in ropes}

    def forward(self, tokens: npt.NDArray[np.int32], places: Places, flow: Flow) -> ops.FloatArray:
        """Compute all layers over tokens (T,); returns the normed hidden states (T, width)."""
        rotations = {
            rope: ops.rope_table(places.positions, frequencies, rope.magnitude, np.float32)
            for rope, frequencies in self._frequencies.items()
        }
        x = _scaled(ops.embedding(self._embedding, tokens), self._spec.embedding_scale)
        self._report("embedding", x)
        for index, layer in enumerate(self._spec.layers):
            weights = self._layers[index]
            if layer.mixer is not None:
                normed = _norm(layer.attention_norm, x, weights, Role.ATTN_NORM)
                added = self._mix(index, layer.mixer, weights, normed, places, flow, rotations)
                added = _norm(layer.attention_post_norm, added, weights, Role.ATTN_POST_NORM)
                x = x + _scaled(added, layer.residual_scale)
            if layer.feed_forward.width:
                if not layer.parallel:
                    normed = _norm(layer.feed_forward_norm, x, weights, Role.FFN_NORM)
                added = self._feed_forward(layer.feed_forward, weights, normed)
                added = _norm(layer.feed_forward_post_norm, added, weights, Role.FFN_POST_NORM)
                x = x + _scaled(added, layer.residual_scale)
            self._report(f"layer.{index}", x)
        x = _norm(self._spec.output_norm, x, self._output_norm, Role.OUTPUT_NORM)
        self._report("norm", x)
        return x

    def logits(self, hidden: ops.FloatArray) -> FloatArray:
        """Logits (R, vocab) of normed hidden states (R, width)."""
        logits = _scaled(ops.linear(hidden, self._head, tiled=self._tiled), self._spec.logit_scale)
        logits = ops.softcap(logits, self._spec.logit_softcap).astype(np.float32, copy=False)
        self._report("logits", logits)
        return logits

    def close(self) -> None:
        """Drop the layers' weights."""
        self._layers = []

    def _mix(
        self, index: int, mixer: Mixer, weights: Weights, x: ops.FloatArray, places: Places, flow: Flow,
        rotations: Rotations,
    ) -> ops.FloatArray:  # fmt: skip
        if isinstance(mixer, Attention):
            return self._attend(index, mixer, weights, x, places, rotations)
        inputs = self._linear(x, weights[Role.MIXER_INPUT])
        if Role.MIXER_CONTROLS in weights:
            controls = ops.linear(x, weights[Role.MIXER_CONTROLS], tiled=self._tiled)
            inputs = np.concatenate([inputs, controls], axis=1)
        mixed = mix(mixer, weights, inputs, self._states.layers[index], flow)
        return self._linear(mixed, weights[Role.MIXER_OUTPUT])

    def _attend(
        self, index: int, attention: Attention, weights: Weights, x: ops.FloatArray, places: Places,
        rotations: Rotations,
    ) -> ops.FloatArray:  # fmt: skip
        heads, kv_heads = attention.heads, attention.kv_heads
        qkv = self._linear(x, weights[Role.QKV], weights.get(Role.QKV_BIAS))
        q, k, v = np.split(qkv, np.cumsum([attention.gated_queries, attention.keys]), axis=1)
        q, *gate = np.split(q.reshape(len(x), heads, -1), 1 + attention.gated, axis=2)
        k, v = (part.reshape(len(x), kv_heads, -1) for part in (k, v))
        if attention.qk_norm_whole:
            q, k = (part.reshape(len(x), 1, -1) for part in (q, k))
        norm = attention.qk_norm
        if not attention.qk_norm_rotated:
            q, k = _norm(norm, q, weights, Role.Q_NORM), _norm(norm, k, weights, Role.K_NORM)
        q, k = q.reshape(len(x), heads, -1), k.reshape(len(x), kv_heads, -1)
        cosine, sine = rotations[attention.rope]
        interleaved = attention.rope.style is RopeStyle.PAIRS
        q, k = (ops.rope(part, cosine, sine, interleaved=interleaved) for part in (q, k))
        if attention.qk_norm_rotated:
            q, k = _norm(norm, q, weights, Role.Q_NORM), _norm(norm, k, weights, Role.K_NORM)
        if attention.temperature is not None:
            q = q * attention.temperature.factors(places.positions)[:, None, None].astype(q.dtype)
        how = ops.Scores(attention.scale, attention.softcap, attention.window)
        mixed = self._cache.attend(index, q, k, v, places, how)
        if attention.gated:
            mixed = mixed * ops.sigmoid(gate[0])
        return self._linear(
            mixed.reshape(len(x), -1), weights[Role.ATTN_OUTPUT], weights.get(Role.ATTN_OUTPUT_BIAS)
        )

    def _feed_forward(self, feed_forward: FeedForward, weights: Weights, x: ops.FloatArray) -> ops.FloatArray:
        inner = self._linear(x, weights[Role.GATE_UP], weights.get(Role.GATE_UP_BIAS))
        activated = _ACTIVATIONS[feed_forward.activation, feed_forward.gated](inner)
        return self._linear(activated, weights[Role.FFN_DOWN], weights.get(Role.FFN_DOWN_BIAS))

    def _linear(
        self, x: ops.FloatArray, weight: FloatArray, bias: FloatArray | None = None
    ) -> ops.FloatArray:
        """A product of a layer."""
        return ops.linear(as_fp8(x) if self._fp8 else x, weight, bias, tiled=self._tiled)

    def _report(self, stage: str, values: npt.NDArray[Any]) -> None:
        if self._trace is not None:
            self._trace(stage, values)


def _norm(norm: Norm | None, x: ops.FloatArray, weights: Weights, role: Role) -> ops.FloatArray:
    if norm is None:
        return x
    normed = (ops.layer_norm if norm.centred else ops.rms_norm)(x, weights[role], norm.eps)
    return normed + weights[Role(f"{role}_bias")] if norm.bias else normed


def _scaled(x: ops.FloatArray, scale: float) -> ops.FloatArray:
    return x if scale == 1.0 else x * x.dtype.type(scale)


def _load(file: GgufFile, weights: Mapping[Role, Weight], *, fp8: bool = False, controls: int = 0) -> Weights:
    """Read weights; matrices become (inputs, outputs): tokens are rows, and multiply from the left.

    In FP8, so many last rows of MIXER_INPUT are a matrix of their own, which is not rounded.
    """

    def load(weight: Weight) -> FloatArray:
        stacked = np.concatenate([file.array(name) for name in weight.names])
        if not weight.is_matrix:
            return stacked
        return np.ascontiguousarray((as_fp8(stacked) if fp8 else stacked).T)

    loaded = {role: load(weight) for role, weight in weights.items()}
    if fp8 and controls:
        stacked = np.concatenate([file.array(name) for name in weights[Role.MIXER_INPUT].names])
        loaded[Role.MIXER_INPUT] = np.ascontiguousarray(loaded[Role.MIXER_INPUT][:, :-controls])
        loaded[Role.MIXER_CONTROLS] = np.ascontiguousarray(stacked[-controls:].T)
    return loaded
