"""The transformer as a list of launches.

The residual stream x is float; what enters a product, and what leaves it, is half, summed in float; logits
are float. A layer is eight launches: norm, QKV, rotation and cache write (on Hopper one launch, `qkv.py`),
attention (one kernel for drawn tokens, one for prompts), output, norm, gate-up with SwiGLU
(two launches but on Hopper), down, where output and down add to the residual stream; in steps of a few
sequences it is five (`few_rows.py`). After attention, the last layer goes on with the rows that draw alone.
"""

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import Arena
from nightmill.worker.runners.gpu.few_rows import MAX_ROWS, FewRows
from nightmill.worker.runners.gpu.gemm import Gemm, padded_rows
from nightmill.worker.runners.gpu.hopper import Kind
from nightmill.worker.runners.gpu.kernels import Kernels
from nightmill.worker.runners.gpu.kv_cache import KvCache
from nightmill.worker.runners.gpu.memory import LOGIT_ROWS
from nightmill.worker.runners.gpu.qkv import Qkv
from nightmill.worker.runners.gpu.slots import SlotState
from nightmill.worker.runners.gpu.steps import StepInputs, StepShape
from nightmill.worker.runners.gpu.weights import LayerWeights, Weights, padded_vocab

__all__ = ["Model"]

_FEWEST_ROWS = (
    2  # above, `down` is faster by a product of `Gemm` in steps of a few (4 on an H200: 645 us, not 671)
)


class Model:
    """Queues whole steps.

    pieces  bytes of each activation (`memory.workspace_pieces`), taken from `arena`
    qkv     queries, keys and values
    few     layers of steps of a few sequences, where the model and the GPU allow them
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, kernels: Kernels, gemm: Gemm, qkv: Qkv, cache: KvCache,
        slots: SlotState, arena: Arena, pieces: dict[str, int], table_width: int, few: FewRows | None = None,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._weights = weights
        self._kernels = kernels
        self._gemm = gemm
        self._qkv = qkv
        self._few = few
        self._cache = cache
        self._slots = slots
        self._table_width = table_width
        self._at = {name: arena.take(size) for name, size in pieces.items()}
        self._layer_spec = layer = spec.layers[0]  # all are equal
        self._queries, self._ffn = layer.attention.queries, layer.feed_forward.width
        gemm.separate_swiglu(kernels.swiglu, self._at["gate_up"])

    @property
    def drawn(self) -> int:
        """Where a step leaves the tokens that it drew, int32 (R,)."""
        return self._at["drawn"]

    @property
    def logits(self) -> int:
        """Where a step leaves the logits of its last LOGIT_ROWS rows or fewer, float (rows, padded_vocab)."""
        return self._at["logits"]

    def tune(self, rows: int, draws: int) -> None:
        """Time the products of steps of `rows` tokens, of which `draws` draw.

        Overwrites activations, waits for the device.
        """
        spec, layers, at = self._spec, self._weights.layers, self._at
        width, ffn = spec.width, self._ffn

        def norm() -> None:
            eps = self._layer_spec.attention_norm.eps
            self._kernels.rms_norm(at["x"], layers[0].attn_norm, at["normed"], rows, width, eps)

        def tune(x: int, weights: list[int], y: int, shape: tuple[int, int, int, Kind]) -> None:
            self._gemm.tune(x, weights, y, shape, norm)

        head_rows = min(draws, LOGIT_ROWS)
        tune(
            at["normed"],
            [self._weights.head],
            at["logits"],
            (head_rows, padded_vocab(spec), width, Kind.FLOAT),
        )
        output, down = [w.attn_output for w in layers], [w.ffn_down for w in layers]
        if self._few is not None and rows <= MAX_ROWS:
            if rows > _FEWEST_ROWS:
                tune(at["activated"], down, at["x"], (rows, width, ffn, Kind.RESIDUAL))
            return
        self._qkv.tune(
            at["normed"], layers, at["qkv"], self._cache.keys[0], self._cache.values[0], at["resolved"], rows,
            norm,
        )  # fmt: skip
        tune(at["mixed"], output, at["x"], (rows, width, self._queries, Kind.RESIDUAL))
        tune(at["normed"], [w.gate_up for w in layers], at["activated"], (rows, ffn, width, Kind.SWIGLU))
        tune(at["activated"], down, at["x"], (rows, width, ffn, Kind.RESIDUAL))

    def forward(self, inputs: StepInputs, shape: StepShape) -> None:
        """Queue a step: all layers over all tokens, then a token drawn for each of the rows that sample."""
        spec, kernels, at = self._spec, self._kernels, self._at
        tokens, width, eps = shape.tokens, spec.width, spec.output_norm.eps
        kernels.gather_tokens(
            inputs.tokens, inputs.token_slots, self._slots.last_token, at["resolved"], tokens
        )
        kernels.embed(at["resolved"], self._weights.embedding, at["x"], tokens)
        layers = self._weights.layers
        if self._few is not None and shape.decodes and tokens <= MAX_ROWS:
            for index, layer in enumerate(layers):
                self._few_layer(self._few, index, layer, inputs, shape)
            x = self._drawing(inputs, shape) if shape.gathers else at["x"]
            kernels.rms_norm(x, self._weights.output_norm, at["normed"], shape.draws, width, eps)
        else:
            layer_eps = self._layer_spec.attention_norm.eps
            kernels.rms_norm(at["x"], layers[0].attn_norm, at["normed"], tokens, width, layer_eps)
            norms = [
                *((layer.attn_norm, layer_eps) for layer in layers[1:]),
                (self._weights.output_norm, eps),
            ]
            for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
                self._layer(index, layer, next_norm, inputs, shape)
        self._draw(inputs, shape)

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        next_norm: tuple[int, float],
        inputs: StepInputs,
        shape: StepShape,
    ) -> None:
        """A layer, up to the norm after it. The last one computes no more than the rows that draw need."""
        last = index == len(self._weights.layers) - 1
        keys, values = self._cache.keys[index], self._cache.values[index]
        self._qkv(self._at["normed"], layer, inputs, self._at["qkv"], keys, values, shape.tokens)
        if last and not shape.draws:
            return
        self._attention(keys, values, inputs, shape)
        mixed, x, rows = self._at["mixed"], self._at["x"], shape.tokens
        if last and shape.gathers:
            every, mixed, rows = mixed, self._at["qkv"], shape.draws  # attention is done with queries
            self._kernels.gather_rows(every, inputs.sample_rows, mixed, rows, self._queries, itemsize=2)
            x = self._drawing(inputs, shape)
        self._feed_forward(layer, next_norm, mixed, x, rows)

    def _attention(self, keys: int, values: int, inputs: StepInputs, shape: StepShape) -> None:
        kernels, at = self._kernels, self._at
        if shape.drawn:
            kernels.decode_attention(
                at["qkv"], keys, values, inputs.block_tables, inputs.context_lengths, at["mixed"],
                shape.drawn, self._table_width, pieces=inputs.pieces, piece_count=shape.pieces,
                apart=shape.again,
            )  # fmt: skip
        if shape.tiles:
            kernels.prefill_attention(
                at["qkv"], keys, values, inputs.block_tables, inputs.sequence_starts,
                inputs.context_lengths, at["mixed"], inputs.tiles, shape.tiles, self._table_width,
                rows=padded_rows(shape.tokens), pages=self._cache.pages,
            )  # fmt: skip

    def _drawing(self, inputs: StepInputs, shape: StepShape) -> int:
        """Where the residual stream of the rows that draw was gathered, in their order."""
        at, width = self._at, self._spec.width
        self._kernels.gather_rows(at["x"], inputs.sample_rows, at["drawing"], shape.draws, width)
        return at["drawing"]

    def _feed_forward(
        self, layer: LayerWeights, next_norm: tuple[int, float], mixed: int, x: int, rows: int
    ) -> None:
        """From the output of attention to the norm after the layer, for so many rows of the stream x."""
        kernels, gemm, at = self._kernels, self._gemm, self._at
        width, ffn, eps = self._spec.width, self._ffn, self._layer_spec.feed_forward_norm.eps
        gemm.residual(mixed, layer.attn_output, x, rows, width, self._queries)
        kernels.rms_norm(x, layer.ffn_norm, at["normed"], rows, width, eps)
        gemm.swiglu(at["normed"], layer.gate_up, at["activated"], rows, ffn, width)
        gemm.residual(at["activated"], layer.ffn_down, x, rows, width, ffn)
        kernels.rms_norm(x, next_norm[0], at["normed"], rows, width, next_norm[1])

    def _few_layer(
        self, few: FewRows, index: int, layer: LayerWeights, inputs: StepInputs, shape: StepShape
    ) -> None:
        """A layer over `x`, from its norm to its last residual addition, in five launches."""
        at, keys, values = self._at, self._cache.keys[index], self._cache.values[index]
        tokens = shape.tokens
        few.qkv(at["x"], layer, inputs, at["qkv"], keys, values, tokens)
        self._attention(keys, values, inputs, shape)
        few.residual(at["mixed"], layer.attn_output, at["x"], tokens, self._queries)
        few.swiglu(at["x"], layer, at["activated"], tokens)
        down = few.residual if tokens <= _FEWEST_ROWS else self._down
        down(at["activated"], layer.ffn_down, at["x"], tokens, self._ffn)

    def _down(self, source: int, weight: int, x: int, tokens: int, inputs: int) -> None:
        self._gemm.residual(source, weight, x, tokens, self._spec.width, inputs)

    def _draw(self, inputs: StepInputs, shape: StepShape) -> None:
        """LM head and sampling of the rows that draw, so many at a time that their logits fit."""
        spec, kernels, at = self._spec, self._kernels, self._at
        outputs = padded_vocab(spec)
        for first in range(0, shape.draws, LOGIT_ROWS):
            rows = min(LOGIT_ROWS, shape.draws - first)
            self._gemm(
                at["normed"] + 2 * first * spec.width, self._weights.head, at["logits"], rows, outputs,
                spec.width, floats=True,
            )  # fmt: skip
            kernels.sample(
                at["logits"], rows, inputs.sample_slots + 4 * first, inputs.sample_rows + 4 * first,
                inputs.positions, self._slots, self.drawn + 4 * first,
            )  # fmt: skip
