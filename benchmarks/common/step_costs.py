"""The bytes that each operation of a step moves at least, and its FLOPs, from a model's spec and formats."""

import math
from dataclasses import dataclass

from nightmill.worker.model.spec import Attention, Experts, FeedForward, LatentAttention, ModelSpec
from nightmill.worker.runners.gpu.device.operands import Matrix
from nightmill.worker.runners.gpu.kinds import has_tail, last_keeping, mixer_sizes
from nightmill.worker.runners.gpu.kv_cache import PAGE, layer_page_bytes
from nightmill.worker.runners.gpu.model import Model
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.weights.layout import LayerWeights
from tests.support.limits import flops_of_state, seen_tokens

__all__ = ["Costs", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """A step of sequences, each of which draws after `length` tokens that come behind `first` others."""

    sequences: int
    first: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.sequences * self.length


class Costs:
    """Bytes and FLOPs of the operations of one step, all layers together; bytes are of the formats kept."""

    def __init__(self, spec: ModelSpec, precision: Precision, model: Model, step: Sizes) -> None:
        """Layers behind the last one that keeps anything compute what is drawn alone."""
        self.of: dict[str, tuple[int, int]] = {}
        tokens, draws, first, length = step.tokens, step.sequences, step.first, step.length
        width, rows, normed, kv = spec.width, tokens, 0, precision.kv
        inputs = 0 if spec.layer_inputs is None else spec.layer_inputs.width * len(spec.layers)
        kept = last_keeping(spec)
        last = max(index for index, layer in enumerate(spec.layers) if layer.mixer is not None)
        for index, (layer, bound) in enumerate(zip(spec.layers, model.layers, strict=True)):
            mixer, sizes, own, ffn = layer.mixer, mixer_sizes(layer.mixer), bound.weights, layer.feed_forward
            if isinstance(mixer, Attention):
                self._add("qkv", own.qkv, own.qkv.rows, width, rows)
                self._add("gates", own.attn_gate, sizes.gates, width, rows)
                window = mixer.window or math.inf
                asking = length if rows == tokens else 1  # tokens of each sequence
                keys = draws * int(min(first + length, window + asking - 1))
                pairs = draws * int(seen_tokens(first + length - asking, asking, window))
                read = keys * layer_page_bytes(mixer, kv) // PAGE
                attention = read + 4 * rows * sizes.outputs, 4 * sizes.outputs * pairs
                self._sum("decode_attention", *attention)
                self._sum("prefill_attention", *attention)
                self._sum("open_gates", 6 * rows * sizes.gates, 0)
            elif isinstance(mixer, LatentAttention):
                keys = draws * (first + length)
                pairs = draws * int(seen_tokens(first, length, math.inf))
                self._latent(mixer, own, tokens, width, keys, pairs)
            elif mixer is not None:
                self._add("mixer input", own.mixer_input, sizes.inputs, width, rows)
                self._add("controls", own.mixer_controls, sizes.controls, width, rows, 4)
                states = 2 * draws * sum(array.bytes for array in layer.state)
                handed = tokens * (2 * (sizes.inputs + sizes.outputs) + 4 * sizes.controls)
                chunked = 0 if tokens == draws else tokens * flops_of_state(mixer)
                self._sum(mixer.title, states + handed, chunked)
            dense = isinstance(ffn, FeedForward) and ffn.width > 0
            normed += rows * (mixer is not None) + rows * dense
            if index == last or (has_tail(spec) and index == kept):
                rows = draws  # that the others need no more
            if mixer is not None:
                self._add("output", own.attn_output, width, sizes.outputs, rows, 8)
            if isinstance(ffn, Experts):
                self._add_experts(ffn, own, width, rows)
            elif dense:
                inner = 2 * ffn.width if ffn.gated else ffn.width
                self._add("gate_up and swiglu", own.gate_up, inner, width, rows, 1 if ffn.gated else 2)
                self._add("down", own.ffn_down, width, ffn.width, rows, 8)
            if layer.inputs is not None:
                self._add("input gate", own.input_gate, layer.inputs.width, width, rows)
                self._add("input up", own.input_up, width, layer.inputs.width, rows, 8)
        if spec.layer_inputs is not None:
            self._add("layer inputs", model.weights.layer_projection, inputs, width, tokens, 6)
        self._add("head", model._weights.head, spec.vocab, width, draws, 4)
        widest = mixer_sizes(spec.layers[last].mixer).outputs
        self.of |= {
            "rms_norm": (6 * width * (normed + draws), 0), "embed": (6 * tokens * width, 0),
            "sample": (4 * draws * spec.vocab, 0), "gather_rows": (4 * draws * (widest + 2 * width), 0),
        }  # fmt: skip

    def _latent(
        self, mixer: LatentAttention, own: LayerWeights, tokens: int, width: int, keys: int, pairs: int
    ) -> None:
        """Count what a layer of latent attention does, but for its output."""
        latent = own.latent
        assert latent is not None
        heads, made_of = mixer.heads, mixer.query_latent or width
        self._add("kv_down", latent.kv_down, mixer.kept, width, tokens)
        self._add("q_down", latent.q_down, mixer.query_latent or 0, width, tokens)
        self._add("q_up", latent.q_up, heads * mixer.head_dim, made_of, tokens)
        matrices = mixer.latent * (mixer.key_dim + mixer.value_dim) * heads
        handed = 2 * tokens * heads * (mixer.head_dim + mixer.kept + mixer.latent + mixer.value_dim)
        self._sum("products of heads", 2 * matrices + handed, 2 * tokens * matrices)
        both = mixer.kept + mixer.latent
        attention = 2 * keys * mixer.kept + 2 * tokens * heads * both, 2 * heads * both * pairs
        self._sum("decode_attention", *attention)
        self._sum("prefill_attention", *attention)
        self._sum("keep", 4 * tokens * (mixer.kept + (mixer.query_latent or 0)), 0)

    def _add_experts(self, experts: Experts, own: LayerWeights, width: int, rows: int) -> None:
        """Those of a layer, of which each is as likely as the others, and what is around them."""
        weights, read, inner = own.experts, experts.latent or width, experts.width
        assert weights is not None
        choices = rows * experts.used
        touched = 1 - (1 - experts.used / experts.count) ** rows
        both = 2 * inner if experts.gated else inner
        self._add("router", weights.router, weights.router.rows, width, rows, 4)
        moved = int(touched * weights.gate_up.bytes) + 2 * (rows * read + choices * inner)
        self._sum("experts gate_up", moved, 2 * choices * both * read)
        moved = int(touched * weights.down.bytes) + 2 * choices * inner + 4 * choices * read
        self._sum("experts down", moved, 2 * choices * inner * read)
        self._add("latent_down", weights.latent_down, weights.latent_down.rows, width, rows)
        self._add("latent_up", weights.latent_up, weights.latent_up.rows, read, rows, 4)
        if (shared := experts.shared) is not None:
            self._add("shared_gate_up", weights.shared_gate_up, weights.shared_gate_up.rows, width, rows)
            self._add("shared_down", weights.shared_down, width, shared.width, rows, 4)
        self._sum("combine", 4 * choices * read + 10 * rows * width, 0)

    def _add(self, name: str, weight: Matrix, outputs: int, inputs: int, rows: int, size: int = 2) -> None:
        """Count a product; size: bytes of an output, as they are written, or read and written."""
        moved = weight.bytes + 2 * rows * inputs + size * rows * outputs
        self._sum(name, moved * (outputs > 0), 2 * rows * outputs * inputs)

    def _sum(self, name: str, moved: int, flops: int) -> None:
        before = self.of.get(name, (0, 0))
        self.of[name] = before[0] + moved, before[1] + flops
