"""The transformer in NumPy, as a spec says it: weights, and the forward pass over the tokens of a step.

float32 throughout. All tokens of a step go through the matrices together; attention takes the tokens that
were drawn in one piece and every longer chunk by itself. The LM head sees only the rows that draw. A job's
tokens do not depend on what else is in the batch (see `ops`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import Attention, FeedForward, ModelSpec, Norm, Role, Weight
from nightmill.worker.runners.reference import ops
from nightmill.worker.runners.reference.kv_cache import KvCache, Places

__all__ = ["Model", "Trace"]

FloatArray = npt.NDArray[np.float32]
Weights = dict[Role, FloatArray]
Rotations = dict[Rope, tuple[ops.FloatArray, ops.FloatArray]]
Trace = Callable[[str, npt.NDArray[Any]], None]


class Model:
    """A model's weights as float32; computes on a cache.

    trace  called with a name and an array at each stage of a step: "embedding", "layer.0", ..., "norm" (all
           tokens), "logits" (only the rows that draw)
    """

    def __init__(self, file: GgufFile, spec: ModelSpec, cache: KvCache, trace: Trace | None = None) -> None:
        self._spec = spec
        self._cache = cache
        self._trace = trace
        self._layers = [_load(file, spec.layer_weights(index)) for index in range(len(spec.layers))]
        self._output_norm = file.array("output_norm.weight")
        self._embedding = file.array("token_embd.weight")
        self._head = (self._embedding if spec.tied_head else file.array("output.weight")).T
        matrices = (weight for layer in self._layers for weight in layer.values() if weight.ndim == 2)
        shapes = {matrix.shape: matrix for matrix in matrices}
        self._tiled = not all(map(ops.rows_are_independent, (*shapes.values(), self._head)))
        ropes = {layer.attention.rope for layer in spec.layers}
        self._frequencies = {rope: rope.frequencies() for rope in ropes}

    def forward(self, tokens: npt.NDArray[np.int32], places: Places) -> ops.FloatArray:
        """All layers over tokens (T,); returns the normed hidden states (T, width)."""
        rotations = {
            rope: ops.rope_table(places.positions, frequencies, rope.magnitude, np.float32)
            for rope, frequencies in self._frequencies.items()
        }
        x = ops.embedding(self._embedding, tokens)
        self._report("embedding", x)
        for index, layer in enumerate(self._spec.layers):
            weights = self._layers[index]
            normed = _norm(layer.attention_norm, x, weights[Role.ATTN_NORM])
            x = x + self._attend(index, layer.attention, weights, normed, places, rotations)
            normed = _norm(layer.feed_forward_norm, x, weights[Role.FFN_NORM])
            x = x + self._feed_forward(layer.feed_forward, weights, normed)
            self._report(f"layer.{index}", x)
        x = _norm(self._spec.output_norm, x, self._output_norm)
        self._report("norm", x)
        return x

    def logits(self, hidden: ops.FloatArray) -> FloatArray:
        """Logits (R, vocab) of normed hidden states (R, width)."""
        logits = self._linear(hidden, self._head).astype(np.float32, copy=False)
        self._report("logits", logits)
        return logits

    def close(self) -> None:
        """Drop the layers' weights."""
        self._layers = []

    def _attend(
        self, index: int, attention: Attention, weights: Weights, x: ops.FloatArray, places: Places,
        rotations: Rotations,
    ) -> ops.FloatArray:  # fmt: skip
        heads, kv_heads = attention.heads, attention.kv_heads
        qkv = self._linear(x, weights[Role.QKV], weights.get(Role.QKV_BIAS))
        q, k, v = np.split(qkv.reshape(len(x), -1, attention.head_dim), [heads, heads + kv_heads], axis=1)
        if attention.qk_norm is not None:
            q = _norm(attention.qk_norm, q, weights[Role.Q_NORM])
            k = _norm(attention.qk_norm, k, weights[Role.K_NORM])
        cosine, sine = rotations[attention.rope]
        interleaved = attention.rope.style is RopeStyle.PAIRS
        q, k = (ops.rope(part, cosine, sine, interleaved=interleaved) for part in (q, k))
        mixed = self._cache.attend(index, q, k, v, places)
        return self._linear(mixed.reshape(len(x), attention.queries), weights[Role.ATTN_OUTPUT])

    def _feed_forward(self, feed_forward: FeedForward, weights: Weights, x: ops.FloatArray) -> ops.FloatArray:
        gate_up = self._linear(x, weights[Role.GATE_UP])
        return self._linear(ops.swiglu(gate_up), weights[Role.FFN_DOWN])

    def _linear(
        self, x: ops.FloatArray, weight: FloatArray, bias: FloatArray | None = None
    ) -> ops.FloatArray:
        return ops.linear(x, weight, bias, tiled=self._tiled)

    def _report(self, stage: str, values: npt.NDArray[Any]) -> None:
        if self._trace is not None:
            self._trace(stage, values)


def _norm(norm: Norm, x: ops.FloatArray, weight: FloatArray) -> ops.FloatArray:
    return ops.rms_norm(x, weight, norm.eps)


def _load(file: GgufFile, weights: Mapping[Role, Weight]) -> Weights:
    """Read weights; matrices become (inputs, outputs): tokens are rows, and multiply from the left."""

    def load(weight: Weight) -> FloatArray:
        stacked = np.concatenate([file.array(name) for name in weight.names])
        return np.ascontiguousarray(stacked.T) if weight.is_matrix else stacked

    return {role: load(weight) for role, weight in weights.items()}
