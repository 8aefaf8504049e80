"""The transformer as a list of launches.

The residual stream x and logits are float; what enters a product, and what leaves it, is elements, summed in
float. Any spec is computed by norm, product, what is done to heads before they are cached, attention
(one kernel for drawn tokens, one for prompts), product, sum, norm, gate and up, activation, product, sum. In
place of attention there may be a state (`mixers`), in place of gate, up and down a mixture of experts
(`feed_forward`), and a layer may have one of its two halves alone. Of
these, kernels that suit the model have several in one launch: rotation in the product before it (`Qkv`), the
activation in gate and up (`GateUp`), the sum in the product, or scale and norms around the sum (`Addition`),
and in steps of a few sequences a whole layer in five launches (`FewRows`). Once tokens have been mixed for
the last time, only the rows that draw go on.
"""

from dataclasses import dataclass

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import DRAW
from nightmill.worker.runners.gpu.activations import LOGIT_ROWS, Activations
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.kinds import last_keeping
from nightmill.worker.runners.gpu.layers import Layer, LayerKernels
from nightmill.worker.runners.gpu.products.chooser import Product, Products
from nightmill.worker.runners.gpu.products.elements.few_rows import MAX_ROWS
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.rows.layer_inputs import LayerInputRows
from nightmill.worker.runners.gpu.rows.logits import LogitScale
from nightmill.worker.runners.gpu.rows.norms import Ending, Norms
from nightmill.worker.runners.gpu.sampling.masks import StagedMasks
from nightmill.worker.runners.gpu.sampling.sampler import ChunkPages, Sampler
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.step_inputs import StepInputs, StepShape
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, Weights

__all__ = ["Model", "Shared"]

# Above, `down` is faster by a `Product` in steps of a few (4 on an H200: 645 us, not 671).
_FEWEST_ROWS = 2


def _few_adds_down(kernels: LayerKernels, rows: int) -> bool:
    """True if `FewRows` computes `down` in a step of a few, not a `Product`."""
    return kernels.few is not None and kernels.few.adds_down and rows <= _FEWEST_ROWS


@dataclass(frozen=True, slots=True)
class Shared:
    """The launchers that all layers share.

    drawing  room for the normed states of the rows that draw, where all rows have one (`StepShape.whole`)
    """

    embedding: Embedding
    norms: Norms
    logit_scale: LogitScale
    sampler: Sampler
    inputs: LayerInputRows | None = None
    drawing: Buffer = ABSENT


class Model:
    """Queues whole steps.

    slots    the address of the table of slots
    history  the tokens of the KV cache
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, shared: Shared, layers: tuple[Layer, ...],
        products: Products, slots: int, history: Buffer, at: Activations,
    ) -> None:  # fmt: skip
        self.shared = shared
        self.layers = layers
        self.head = products.of(Kind.FLOAT, weights.head.rows, spec.width, weights.head.format)
        self._weights = weights
        self.slots = slots
        self._history = history
        self._at = at
        self._has_few = all(layer.kernels.few is not None for layer in layers)
        self.projection: Product | None = None
        if shared.inputs is not None:
            table = weights.layer_projection
            self.projection = products.of(Kind.PLAIN, table.rows, spec.width, table.format)
        self._last_mixing = max(index for index, layer in enumerate(layers) if layer.attended is not None)
        self._last_keeping = last_keeping(spec)

    @property
    def weights(self) -> Weights:
        """Weights of all layers, and of embedding and head."""
        return self._weights

    @property
    def activations(self) -> Activations:
        """The buffers of a step, which may be overwritten between two."""
        return self._at

    def normed(self, shape: StepShape) -> Buffer:
        """Buffer of the normed states of a step's rows that draw or are pooled, elements (R, width)."""
        return self.shared.drawing if shape.whole and shape.gathers else self._at.normed

    @property
    def residual(self) -> Buffer:
        """Buffer of the residual stream, float (T, width), which is of no use once the layers are done."""
        return self._at.x

    @property
    def drawn(self) -> Buffer:
        """Buffer of the tokens that a step drew, int32 (R,)."""
        return self._at.drawn

    @property
    def found(self) -> Buffer:
        """Buffer of their log-probabilities, FOUND (R,), if any draw wants them."""
        return self._at.found

    @property
    def logits(self) -> Buffer:
        """Buffer of the logits of a step's last LOGIT_ROWS rows or fewer, float (rows, padded_vocab)."""
        return self._at.logits

    def tune(self, rows: int, draws: int) -> None:
        """Time the products of steps of `rows` tokens, of which `draws` draw.

        Overwrites activations, waits for the device.
        """
        at, first = self._at, self.layers[0].first_norm

        def norm() -> None:
            self.shared.norms(at.x, first, at.entering, rows)

        self.head.tune(at.normed, [self._weights.head], at.logits, min(draws, LOGIT_ROWS), norm)
        kinds: dict[LayerKernels, list[Layer]] = {}
        for layer in self.layers:
            kinds.setdefault(layer.kernels, []).append(layer)
        for kernels, layers in kinds.items():
            first_layer, own, weights = layers[0], layers[0].at, [layer.weights for layer in layers]
            few = self._has_few and rows <= MAX_ROWS
            if not few and kernels.mixer is not None:
                kernels.mixer.tune(at.entering, layers, rows, norm)
            if not few and kernels.output is not None and first_layer.attended is not None:
                sums = first_layer.attended.added or at.x
                kernels.output.tune(own.mixed, [w.attn_output for w in weights], sums, rows, norm)
            if not few and kernels.gate_up is not None:
                kernels.gate_up.tune(at.entering, weights, own.activated, rows, norm)
            if kernels.mixture is not None:
                kernels.mixture.tune(at.entering, weights, rows, norm)
            down = kernels.down
            if (
                down is not None
                and not (few and _few_adds_down(kernels, rows))
                and first_layer.fed is not None
            ):
                sums = first_layer.fed.added or at.x
                down.tune(own.activated, [w.ffn_down for w in weights], sums, rows, norm)
            if kernels.input_gate is not None and kernels.input_up is not None:
                gates, ups = zip(*((w.input_gate, w.input_up) for w in weights), strict=True)
                kernels.input_gate.tune(at.entering, gates, at.input_gate, rows, norm)
                kernels.input_up.tune(at.input_gate, ups, at.added, rows, norm)
        if self.projection is not None:
            self.projection.tune(at.entering, [self._weights.layer_projection], at.inputs, rows, norm)

    def forward(
        self, inputs: StepInputs, shape: StepShape, tail: tuple[StepInputs, StepShape] | None = None
    ) -> None:
        """Queue a step's layers, up to the norm of the rows that draw.

        tail  the rows that draw as a step of their own, for layers behind the last that keeps anything
        """
        at, tokens = self._at, shape.tokens
        self.shared.sampler.gather_tokens(
            inputs.tokens,
            inputs.token_slots,
            self.slots,
            inputs.cache_rows,
            self._history,
            at.tokens,
            tokens,
        )
        self.shared.embedding.embed(at.tokens, self._weights.embedding, at.x, tokens)
        self._add_to_embeddings(inputs, tokens)
        if self.projection is not None and (given := self.shared.inputs) is not None:
            weights = self._weights
            self.shared.norms(at.x, NO_NORM, at.entering, tokens)
            self.projection(at.entering, weights.layer_projection, at.inputs, tokens)
            norm = weights.layer_projection_norm
            given.make(at.tokens, weights.layer_embedding, at.inputs, norm, tokens)
        self.through_layers(inputs, shape, tail)

    def through_layers(
        self, inputs: StepInputs, shape: StepShape, tail: tuple[StepInputs, StepShape] | None = None
    ) -> None:
        """Queue the same from the residual stream on."""
        if self._has_few and shape.decodes and shape.tokens <= MAX_ROWS:
            self._few_rows(inputs, shape)
        else:
            self._any_rows(inputs, shape, tail)
        if shape.whole and shape.gathers:
            self.shared.embedding.gather_rows(self._at.normed, inputs.rows, self.shared.drawing, shape.draws)

    def fill_pages(self, inputs: StepInputs, shape: StepShape) -> None:
        """Queue of a step that draws nothing, from the residual stream on, what its pages get, no more."""
        self._any_rows(inputs, shape, None)

    def _add_to_embeddings(self, inputs: StepInputs, rows: int) -> None:
        """Queue what an encoder has beside its tokens' embeddings, and their norm."""
        at, weights = self._at, self._weights
        if weights.positions is not ABSENT or weights.text_types is not ABSENT:
            self.shared.embedding.add(inputs.positions, weights.positions, weights.text_types, at.x, rows)
        if weights.embedding_norm is not NO_NORM:
            ending = Ending(before=weights.embedding_norm, behind=True)
            self.shared.norms.add(None, ABSENT, ending, at.x, at.entering, rows)

    def draw(
        self,
        inputs: StepInputs,
        shape: StepShape,
        masks: StagedMasks | None = None,
        *,
        adjusted: bool = False,
        logprobs: bool = False,
    ) -> None:
        """Queue LM head and sampling of the step whose layers were queued last.

        So many rows at a time that their logits fit.

        adjusted  the logits of some draws are adjusted
        logprobs  some draws want log-probabilities
        """
        at, sampler, normed = self._at, self.shared.sampler, self.normed(shape)
        for first in range(0, shape.heads, LOGIT_ROWS):
            rows = min(LOGIT_ROWS, shape.heads - first)
            draws = inputs.draws + DRAW.itemsize * first
            self.head(normed.from_row(first), self._weights.head, at.logits, rows)
            self.shared.logit_scale(at.logits, rows)
            if masks is not None:
                address, number, count = masks.send(first, rows)
                if count:
                    sampler.apply_masks(at.logits, rows, draws, address, number)
            if adjusted:
                chunks = ChunkPages(
                    inputs.page_tables, inputs.table_width, inputs.sequence_starts, shape.sequences
                )
                sampler.adjust(at.logits, rows, draws, self.slots, self._history, chunks)
            drawn = at.drawn.from_row(first)
            sampler.sample(at.logits, rows, draws, self.slots, drawn)
            if logprobs:
                sampler.log_probabilities(at.logits, rows, draws, drawn, at.found.from_row(first))

    def _any_rows(
        self, inputs: StepInputs, shape: StepShape, tail: tuple[StepInputs, StepShape] | None
    ) -> None:
        """Queue all layers; after the last mixer no more is computed than the rows that draw need.

        With a tail, after the last layer that keeps anything: mixers behind it take the tail's rows.
        """
        at, x, rows, norms = self._at, self._at.x, shape.tokens, self.shared.norms
        entering, last, slots, drawing = at.entering, self.layers[-1], inputs.token_slots, 0
        draws, gathers = shape.draws, shape.gathers and not shape.whole
        gathering = self._last_mixing if tail is None else self._last_keeping
        norms(x, self.layers[0].first_norm, entering, rows)
        for index, layer in enumerate(self.layers):
            kernels, weights, own = layer.kernels, layer.weights, layer.at
            end, between = at.normed if layer is last else entering, layer.given is not None
            if kernels.mixer is not None and layer.attended is not None:
                mixed, ends = own.mixed, index == gathering
                pages = inputs.of(layer.cache.kind)
                kernels.mixer.enter(entering, layer, pages, rows)
                is_over = index == self._last_keeping and not draws and not shape.whole
                if is_over and kernels.mixer.entering_is_enough:
                    return
                kernels.mixer.mix(layer, pages, shape)
                if is_over:
                    return
                if ends and gathers:
                    rows, mixed, slots, drawing = draws, own.mixed_drawing, 0, inputs.rows
                    self.shared.embedding.gather_rows(own.mixed, inputs.rows, mixed, rows)
                    x = self._gathered(inputs, shape)
                    inputs, shape = (inputs, shape) if tail is None else tail
                    if layer.parallel:
                        norms(x, weights.attn_norm, entering, rows)
                is_end = layer is last and not layer.feeds and layer.given is None
                layer.attended(mixed, x, at.normed if is_end else entering, rows)
            if kernels.gate_up is not None and layer.fed is not None:
                kernels.gate_up(entering, weights, own.activated, rows)
                layer.fed(own.activated, x, entering if between else end, rows)
            elif kernels.mixture is not None and layer.combined is not None:
                target = entering if between else end
                kernels.mixture(entering, weights, x, layer.combined, target, rows, slots)
            if layer.given is not None and kernels.input_gate is not None and self.shared.inputs is not None:
                kernels.input_gate(entering, weights.input_gate, at.input_gate, rows)
                self.shared.inputs.gate(at.input_gate, at.inputs, index, rows, drawing)
                layer.given(at.input_gate, x, end, rows)

    def _few_rows(self, inputs: StepInputs, shape: StepShape) -> None:
        """Queue all layers for a few drawn tokens, each layer from its norm on in few launches."""
        x, rows = self._at.x, shape.tokens
        for layer in self.layers:
            kernels, weights, own = layer.kernels, layer.weights, layer.at
            few, mixer, down = kernels.few, kernels.mixer, kernels.down
            assert few is not None and mixer is not None and down is not None
            pages = inputs.of(layer.cache.kind)
            mixer.enter_few(few, x, layer, pages, rows)
            mixer.mix(layer, pages, shape)
            few.residual(own.mixed, weights.attn_output, x, rows)
            few.swiglu(x, weights, own.activated, rows)
            add = few.residual if _few_adds_down(kernels, rows) else down
            add(own.activated, weights.ffn_down, x, rows)
        if shape.gathers and not shape.whole:
            x, rows = self._gathered(inputs, shape), shape.draws
        self.shared.norms(x, self._weights.output_norm, self._at.normed, rows)

    def _gathered(self, inputs: StepInputs, shape: StepShape) -> Buffer:
        """The residual stream of the rows that draw."""
        at = self._at
        self.shared.embedding.gather_rows(at.x, inputs.rows, at.x_drawing, shape.draws)
        return at.x_drawing
