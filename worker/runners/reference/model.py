"""The transformer in NumPy, as a spec says it: weights, and the forward pass over the tokens of a step.

float32 throughout. All tokens of a step go through the matrices together; attention takes the tokens that
were drawn in one piece and every longer chunk by itself, and so do layers with states. The LM head sees only
the rows that draw. A job's tokens do not depend on what else is in the batch (see `ops`).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    Attention,
    Encoder,
    Experts,
    FeedForward,
    LatentAttention,
    LayerInputs,
    Mixer,
    ModelSpec,
    Norm,
    Role,
)
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.experts import choose, mix_experts
from nightmill.worker.runners.reference.kv_cache import Places, ReferenceKvCache
from nightmill.worker.runners.reference.loading import load, load_layer
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
    (Activation.GELU_ERF, True): ops.geglu_erf,
    (Activation.GELU_ERF, False): ops.gelu_erf,
    (Activation.RELU_SQUARED, True): ops.reglu_squared,
    (Activation.RELU_SQUARED, False): ops.relu_squared,
    (Activation.CLAMPED_SWIGLU, True): ops.clamped_swiglu,
}
# What `ops.rows_are_independent` found, by shape and layout of the matrix, for all models of this process.
_TILED: dict[tuple[tuple[int, ...], bool, str], bool] = {}
Trace = Callable[[str, npt.NDArray[Any]], None]


class ReferenceModel:
    """A model's weights as float32; computes on a cache and on states.

    trace  called with a name and an array at each stage of a step: "embedding", "layer.0", ..., "norm" (all
           tokens), "logits" (only the rows that draw); "experts.0", ..., each token's, the best first
    fp8    round the matrices of layers, and what is multiplied with them, to FP8
    beside another model of the file, whose embedding and head it has
    """

    def __init__(
        self, file: GgufFile, spec: ModelSpec, cache: ReferenceKvCache, states: ReferenceStates,
        trace: Trace | None = None, *, fp8: bool = False, beside: "ReferenceModel | None" = None,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._fp8 = fp8
        self._cache = cache
        self._states = states
        self._trace = trace
        self._layers = [
            load_layer(file, spec.layers[index], spec.layer_weights(index), fp8=fp8)
            for index in range(len(spec.layers))
        ]
        large = (Role.EMBEDDING, Role.HEAD, Role.LAYER_EMBEDDING)
        outside = {role: weight for role, weight in spec.weights().items() if role not in large}
        self._outside = load(file, outside)
        self._file = file
        self._embedding: FloatArray
        self._head: FloatArray
        if beside is not None:
            self._embedding, self._head = beside._embedding, beside._head
        else:
            self._embedding = file.array("token_embd.weight")
            self._head = (self._embedding if spec.tied_head else file.array("output.weight")).T
        ropes = spec.ropes
        self._frequencies = {rope: rope.frequencies() for rope in ropes}

    def forward(
        self, tokens: npt.NDArray[np.int32], places: Places, flow: Flow,
        text_types: npt.NDArray[np.int32] | None = None,
    ) -> ops.FloatArray:  # fmt: skip
        """Compute all layers over tokens (T,); returns the normed hidden states (T, width).

        text_types  of tokens (T,), as of `StepBatch`
        """
        x = self.embedding(tokens)
        if self._spec.encoder is not None:
            x = self._embedded(self._spec.encoder, x, places.positions, text_types)
        self._report("embedding", x)
        x = self.normed(self.through(x, tokens, places, flow))
        self._report("norm", x)
        return x

    def embedding(self, tokens: npt.NDArray[np.int32]) -> ops.FloatArray:
        """The rows of the embedding (T, width)."""
        x: ops.FloatArray = _scaled(ops.embedding(self._embedding, tokens), self._spec.embedding_scale)
        return x

    def normed(self, x: ops.FloatArray) -> ops.FloatArray:
        """Apply the last norm to rows (T, width)."""
        return _norm(self._spec.output_norm, x, self._outside, Role.OUTPUT_NORM)

    def through(
        self, x: ops.FloatArray, tokens: npt.NDArray[np.int32], places: Places, flow: Flow
    ) -> ops.FloatArray:
        """Compute all layers over rows x (T, width) of tokens (T,)."""
        rotations = {
            rope: ops.rope_table(places.positions, frequencies, rope.magnitude, np.float32)
            for rope, frequencies in self._frequencies.items()
        }
        inputs = self._inputs_of_layers(tokens, x)
        for index, layer in enumerate(self._spec.layers):
            weights = self._layers[index]
            if layer.norms_behind:
                x = self._post_normed(index, x, places, flow, rotations)
                self._report(f"layer.{index}", x)
                continue
            if layer.mixer is not None:
                normed = _norm(layer.attention_norm, x, weights, Role.ATTN_NORM)
                added = self._mix(index, layer.mixer, weights, normed, places, flow, rotations)
                added = _norm(layer.attention_post_norm, added, weights, Role.ATTN_POST_NORM)
                x = x + _scaled(added, layer.residual_scale)
            if layer.feed_forward.width:
                if not layer.parallel:
                    normed = _norm(layer.feed_forward_norm, x, weights, Role.FFN_NORM)
                added = self._feed_forward(index, layer.feed_forward, weights, normed, x)
                added = _norm(layer.feed_forward_post_norm, added, weights, Role.FFN_POST_NORM)
                x = x + _scaled(added, layer.residual_scale)
            if layer.inputs is not None:
                x = x + self._own_input(layer.inputs, weights, x, inputs[:, index])
            if layer.output_scale:
                x = x * weights[Role.LAYER_SCALE]
            self._report(f"layer.{index}", x)
        return x

    def _embedded(
        self, encoder: Encoder, x: ops.FloatArray, positions: npt.NDArray[np.int32],
        text_types: npt.NDArray[np.int32] | None,
    ) -> ops.FloatArray:  # fmt: skip
        """Add the rows of an encoder's tables to its tokens', and norm the sums."""
        if encoder.token_types:
            rows = text_types if self._spec.paired_positions and text_types is not None else 0
            x = x + self._outside[Role.TEXT_TYPES][rows]
        if encoder.positions:
            x = x + self._outside[Role.POSITIONS][positions]
        return _norm(encoder.norm, x, self._outside, Role.EMBEDDING_NORM)

    def _post_normed(
        self, index: int, x: ops.FloatArray, places: Places, flow: Flow, rotations: Rotations
    ) -> ops.FloatArray:
        """A layer whose norms come behind what is added."""
        layer, weights = self._spec.layers[index], self._layers[index]
        assert layer.mixer is not None
        mixed = self._mix(index, layer.mixer, weights, x, places, flow, rotations)
        x = _norm(layer.attention_norm, x + mixed, weights, Role.ATTN_NORM)
        added = self._feed_forward(index, layer.feed_forward, weights, x, x)
        return _norm(layer.feed_forward_norm, x + added, weights, Role.FFN_NORM)

    def logits(self, hidden: ops.FloatArray) -> FloatArray:
        """Logits (R, vocab) of normed hidden states (R, width)."""
        logits = _scaled(self._product(hidden, self._head), self._spec.logit_scale)
        logits = ops.softcap(logits, self._spec.logit_softcap).astype(np.float32, copy=False)
        if self._spec.suppressed:
            logits[:, list(self._spec.suppressed)] = -np.inf
        self._report("logits", logits)
        return logits

    def _inputs_of_layers(self, tokens: npt.NDArray[np.int32], x: ops.FloatArray) -> ops.FloatArray:
        """The rows (T, layers, columns) that layers have as inputs of their own; none: no columns.

        Of the table only the tokens' rows are read.
        """
        inputs, layers = self._spec.layer_inputs, len(self._spec.layers)
        if inputs is None:
            return np.zeros((len(x), layers, 0), dtype=x.dtype)
        (table,) = self._spec.weights()[Role.LAYER_EMBEDDING].names
        looked_up = self._file.rows(table, tokens) * x.dtype.type(math.sqrt(inputs.width))
        made: ops.FloatArray = self._product(x, self._outside[Role.LAYER_PROJECTION])
        made = made * x.dtype.type(x.shape[1] ** -0.5)
        made = _norm(inputs.norm, made.reshape(len(x), layers, -1), self._outside, Role.LAYER_PROJECTION_NORM)
        added: ops.FloatArray = made + looked_up.reshape(made.shape)
        return added * x.dtype.type(2**-0.5)

    def _own_input(
        self, inputs: LayerInputs, weights: Weights, x: ops.FloatArray, row: ops.FloatArray
    ) -> ops.FloatArray:
        """Return what a layer adds for its input (T, columns)."""
        activate = _ACTIVATIONS[inputs.activation, False]
        gated = activate(self._product(x, weights[Role.INPUT_GATE])) * row
        added = self._product(gated, weights[Role.INPUT_UP])
        return _norm(inputs.norm, added, weights, Role.INPUT_POST_NORM)

    def close(self) -> None:
        """Drop the layers' weights."""
        self._layers = []

    def _mix(
        self, index: int, mixer: Mixer, weights: Weights, x: ops.FloatArray, places: Places, flow: Flow,
        rotations: Rotations,
    ) -> ops.FloatArray:  # fmt: skip
        if isinstance(mixer, Attention):
            return self._attend(index, mixer, weights, x, places, rotations)
        if isinstance(mixer, LatentAttention):
            return self._attend_latent(index, mixer, weights, x, places, rotations)
        inputs = self._linear(x, weights[Role.MIXER_INPUT])
        if Role.MIXER_CONTROLS in weights:
            controls = self._product(x, weights[Role.MIXER_CONTROLS])
            inputs = np.concatenate([inputs, controls], axis=1)
        mixed = mix(mixer, weights, inputs, self._states.layers[index], flow)
        return self._linear(mixed, weights[Role.MIXER_OUTPUT])

    def _attend(
        self, index: int, attention: Attention, weights: Weights, x: ops.FloatArray, places: Places,
        rotations: Rotations,
    ) -> ops.FloatArray:  # fmt: skip
        rows, heads, kv_heads = len(x), attention.heads, attention.kv_heads
        qkv = self._linear(x, weights[Role.QKV], weights.get(Role.QKV_BIAS))
        q, k, v = np.split(qkv, np.cumsum([attention.gated_queries, attention.keys]), axis=1)
        q, *gate = np.split(q.reshape(rows, heads, -1), 1 + attention.gated, axis=2)
        cosine, sine = rotations[attention.rope]
        interleaved = attention.rope.style is RopeStyle.PAIRS

        def turned(part: ops.FloatArray, heads: int, role: Role) -> ops.FloatArray:
            """Norm and rotate the queries or the keys of all heads."""
            norm = attention.qk_norm
            if not attention.qk_norm_rotated:
                part = _norm(
                    norm, part.reshape(rows, 1 if attention.qk_norm_whole else heads, -1), weights, role
                )
            part = ops.rope(part.reshape(rows, heads, -1), cosine, sine, interleaved=interleaved)
            return _norm(norm, part, weights, role) if attention.qk_norm_rotated else part

        if attention.keys_of is None:
            v = (k if attention.values_are_keys else v).reshape(rows, kv_heads, -1)
            if attention.value_norm is not None:
                v = ops.unit_rms(v, attention.value_norm.eps)
            self._cache.write(index, turned(k, kv_heads, Role.K_NORM), v, places)
        q = turned(q, heads, Role.Q_NORM)
        if attention.temperature is not None:
            q = q * attention.temperature.factors(places.positions)[:, None, None].astype(q.dtype)
        how = ops.Scores(
            attention.scale, attention.softcap, attention.window, weights.get(Role.SINKS), attention.causal
        )
        read = index if attention.keys_of is None else attention.keys_of
        mixed = self._cache.attend(read, q, places, how)
        if attention.gated:
            mixed = mixed * ops.sigmoid(gate[0])
        return self._linear(
            mixed.reshape(rows, -1), weights[Role.ATTN_OUTPUT], weights.get(Role.ATTN_OUTPUT_BIAS)
        )

    def _attend_latent(
        self, index: int, attention: LatentAttention, weights: Weights, x: ops.FloatArray, places: Places,
        rotations: Rotations,
    ) -> ops.FloatArray:  # fmt: skip
        rows, heads, latent = len(x), attention.heads, attention.latent
        cosine, sine = rotations[attention.rope]
        interleaved = attention.rope.style is RopeStyle.PAIRS
        made_of = x
        if attention.query_latent is not None:
            made_of = _norm(attention.norm, self._linear(x, weights[Role.Q_DOWN]), weights, Role.Q_DOWN_NORM)
        q, q_rotated = np.split(
            self._linear(made_of, weights[Role.Q_UP]).reshape(rows, heads, -1), [attention.key_dim], axis=2
        )
        kept, k_rotated = np.split(self._linear(x, weights[Role.KV_DOWN])[:, None], [latent], axis=2)
        kept = _norm(attention.norm, kept, weights, Role.KV_DOWN_NORM)
        q_rotated, k_rotated = (
            ops.rope(part, cosine, sine, interleaved=interleaved) for part in (q_rotated, k_rotated)
        )
        absorbed = np.stack([self._product(q[:, head], weights[Role.K_UP][head]) for head in range(heads)], 1)
        keys = np.concatenate([kept, k_rotated], axis=2)
        self._cache.write(index, keys, keys, places)
        q = np.concatenate([absorbed, q_rotated], axis=2)
        mixed = self._cache.attend(index, q, places, ops.Scores(attention.scale))
        values = [self._product(mixed[:, head, :latent], weights[Role.V_UP][head]) for head in range(heads)]
        return self._linear(np.concatenate(values, axis=1), weights[Role.ATTN_OUTPUT])

    def _feed_forward(
        self, index: int, network: FeedForward | Experts, weights: Weights, x: ops.FloatArray,
        stream: ops.FloatArray,
    ) -> ops.FloatArray:  # fmt: skip
        """Return what a network adds for x, which the layer's norm made of the residual stream."""
        activate = _ACTIVATIONS[network.activation, network.gated]
        if isinstance(network, Experts):
            return self._experts(index, network, weights, x, stream)
        inner = self._linear(x, weights[Role.GATE_UP], weights.get(Role.GATE_UP_BIAS))
        return self._linear(activate(inner), weights[Role.FFN_DOWN], weights.get(Role.FFN_DOWN_BIAS))

    def _experts(
        self, index: int, experts: Experts, weights: Weights, x: ops.FloatArray, stream: ops.FloatArray
    ) -> ops.FloatArray:
        routing = read = x
        if experts.beside is not None:
            scale = x.dtype.type(x.shape[1] ** -0.5)
            routing = ops.rms_norm(stream, weights[Role.ROUTER_NORM], experts.beside.eps) * scale
            read = _norm(experts.beside, stream, weights, Role.ROUTED_NORM)
        logits = self._product(routing, weights[Role.ROUTER], weights.get(Role.ROUTER_BIAS))
        routed = choose(experts, logits, weights.get(Role.SELECTION_BIAS))
        self._report(f"experts.{index}", routed[0])
        if experts.latent is not None:
            read = self._linear(read, weights[Role.LATENT_DOWN])
        activate = _ACTIVATIONS[experts.activation, experts.gated]
        mixed = mix_experts(experts, weights, read, self._linear, activate, routed)
        if experts.latent is not None:
            mixed = self._linear(mixed, weights[Role.LATENT_UP])
        if experts.shared is None:
            return mixed
        inner = self._linear(x, weights[Role.SHARED_GATE_UP], weights.get(Role.SHARED_GATE_UP_BIAS))
        inner = _ACTIVATIONS[experts.shared.activation, experts.shared.gated](inner)
        shared = self._linear(inner, weights[Role.SHARED_DOWN], weights.get(Role.SHARED_DOWN_BIAS))
        if experts.shared_gated:
            shared = shared * ops.sigmoid((x * weights[Role.SHARED_GATE]).sum(axis=1, keepdims=True))
        if experts.beside is not None:
            shared = _norm(experts.beside, shared, weights, Role.SHARED_POST_NORM)
            mixed = _norm(experts.beside, mixed, weights, Role.ROUTED_POST_NORM)
        return mixed + shared

    def _linear(
        self, x: ops.FloatArray, weight: FloatArray, bias: FloatArray | None = None
    ) -> ops.FloatArray:
        """A product of a layer."""
        return self._product(as_fp8(x) if self._fp8 else x, weight, bias)

    def _product(
        self, x: ops.FloatArray, weight: FloatArray, bias: FloatArray | None = None
    ) -> ops.FloatArray:
        """A product in tiles of rows, but where a trial has shown that this BLAS needs none."""
        kind = weight.shape, weight.flags.c_contiguous, weight.dtype.char
        if kind not in _TILED:
            _TILED[kind] = not ops.rows_are_independent(weight)
        return ops.linear(x, weight, bias, tiled=_TILED[kind])

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
