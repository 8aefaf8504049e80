"""Whole models by the launchers and kernels of the CUDA runner, on the host: only products are NumPy's.

So what a step is made of, in which order and from which buffers, is held to the reference runner and to the
answers of other engines without a GPU. Slow: a kernel's threads take turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu import loading
from nightmill.worker.runners.gpu.activations import Activations
from nightmill.worker.runners.gpu.attention.choice import Attentions
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.gpu.device.operands import ELEMENT, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.feed_forward import ExpertLaunchers
from nightmill.worker.runners.gpu.kv_cache import PAGE, KvCache, kinds_layout
from nightmill.worker.runners.gpu.layers import Launchers, bind_layers
from nightmill.worker.runners.gpu.loading import load_weights
from nightmill.worker.runners.gpu.mixers import Mixers
from nightmill.worker.runners.gpu.model import Model, Shared
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.rows.layer_inputs import LayerInputRows
from nightmill.worker.runners.gpu.rows.logits import LogitScale
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.states.memory import States
from nightmill.worker.runners.gpu.step_inputs import StepShape
from nightmill.worker.runners.gpu.steps import StepBounds, StepBuffers, drawing_rows
from nightmill.worker.runners.gpu.weights.layout import padded_vocab
from nightmill.worker.runners.page_layout import PageLayout
from nightmill.worker.runners.reference import ops
from tests.support.elements import as_words, from_words
from tests.unit.runners.host_kernels import HostDevice, Staged, run_models_on_host

Floats = npt.NDArray[np.float32]
GATED = {Kind.SWIGLU: ops.swiglu, Kind.GEGLU: ops.geglu}


@dataclass(frozen=True)
class HostProduct:
    """A product of elements, in place of `Product`: sums are float."""

    device: HostDevice
    kind: Kind
    outputs: int

    @property
    def activation(self) -> Any:
        """As of `Product`."""
        return self.kind.activation

    def __call__(self, x: Buffer, weight: Matrix, y: Buffer, rows: int) -> None:
        """Compute it."""
        assert weight.format.plain
        device, columns = self.device, weight.columns
        numbers = from_words(device.download(x.address, (rows, columns), np.uint16), device.element)
        matrix = device.download(weight.address, (weight.rows, columns), np.uint16)
        weights = from_words(matrix, device.element).astype(np.float32)
        sums = ops.linear(numbers.astype(np.float32), weights.T)  # a row's bits do not hang on the others
        found = GATED[self.kind](sums) if self.kind in GATED else sums
        found = np.ascontiguousarray(found[:, : self.outputs], dtype=np.float32)
        if self.kind is Kind.RESIDUAL:
            found += device.download(y.address, found.shape, np.float32)
        device.copy_in(y.address, as_words(found, device.element) if y.dtype == ELEMENT else found)


class HostDequantizer:
    """In place of `Dequantizer`."""

    def __init__(self, device: HostDevice, staging: Staged) -> None:
        self._device = device

    def load(self, raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, out: int, *, floats: bool) -> None:
        """Write the numbers of a tensor's bytes."""
        numbers = dequantize(raw, kind).astype(np.float32).reshape(-1)
        self._device.copy_in(out, numbers if floats else as_words(numbers, self._device.element))

    def fits(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""


class HostProducts:
    """In place of `Products`."""

    takes_packed = False
    clock = None

    def __init__(self, device: HostDevice) -> None:
        self._device = device

    def of(self, kind: Kind, outputs: int, inputs: int, weights: Format | None = None) -> HostProduct:
        """The product of these sizes."""
        return HostProduct(self._device, kind, outputs)

    def close(self) -> None:
        """Nothing is held."""


class HostModel:
    """A model of so many slots and pages, whose steps are computed at once."""

    def __init__(
        self, device: HostDevice, file: GgufFile, spec: ModelSpec, *, slots: int, pages: int, context: int,
        tokens: int,
    ) -> None:  # fmt: skip
        check_spec(spec)
        self._spec, self._tokens = spec, tokens
        self.device: Any = device
        precision = Precision(element=device.element, kv=device.kv)
        attentions = Attentions(self.device, spec, max_context=context)
        self._plans = attentions.plans
        at = Activations.allocate(self.device, spec, precision, max_tokens=tokens, max_draws=tokens)
        norms, activate = Norms(self.device, spec), Activate(self.device)
        products: Any = HostProducts(device)
        weights = load_weights(self.device, file, spec, precision)
        self.layout: PageLayout | None = kinds_layout(spec, device.kv)
        self.page_kinds = () if self.layout is None else self.layout.kinds
        pages += 2
        cache = KvCache.allocate(self.device, spec, pages * max(1, len(self.page_kinds)))
        states = States(self.device, spec, slots=slots, snapshots=0, depth=1)
        mixers = Mixers(self.device, spec, products, activate, attentions, at, max_context=context)
        experts = ExpertLaunchers.of(self.device, spec, precision, norms, padding=slots)
        launchers = Launchers(products, norms, activate, mixers, experts)
        layers = bind_layers(self.device, spec, weights, cache, states, at, launchers)
        bounds = StepBounds(
            max_tokens=tokens, max_draws=tokens, slots=slots, table_width=-(-context // PAGE),
            max_pieces=self._plans.most_pieces(tokens), plans=len(self._plans),
            strides=tuple(kind.stride for kind in self.page_kinds) or (1,), paired=spec.paired_positions,
        )  # fmt: skip
        self._steps, self._tail = (
            StepBuffers(self.device, own, padding_page=pages - 1, depth=1)
            for own in (bounds, replace(bounds, slots=tokens))
        )
        self.tails = 0
        """Steps whose rows that draw went on alone."""
        given = None if spec.layer_inputs is None else LayerInputRows(self.device, spec)
        sampler: Any = SimpleNamespace(gather_tokens=self._gather)
        shared = Shared(
            Embedding(self.device, spec.vocab, spec.embedding_scale), norms, LogitScale(self.device, spec),
            sampler, given,
        )  # fmt: skip
        self._model = Model(spec, weights, shared, layers, products, 0, cache.tokens, at)

    def _gather(
        self, tokens: int, slots: int, table: int, rows: int, history: Buffer, out: Buffer, count: int
    ) -> None:
        self.device.copy_in(out.address, self.device.download(tokens, (count,), np.int32))

    def logits(self, batch: StepBatch, *, tail: bool = False) -> Floats:
        """Compute a step; the logits of its draws.

        tail  behind the last layer that keeps anything the rows that draw go on alone
        """
        tiles, pieces, ((first, cut, _), *further) = self._plans.divide(0, batch)
        draws = len(batch.draws)
        shape = StepShape(
            tokens=len(batch.tokens), sequences=len(batch.slots), drawn=batch.drawn, draws=draws, tiles=first,
            pieces=cut, further=tuple(further),
        )  # fmt: skip
        inputs, own = self._steps.write(0, batch, shape, tiles, pieces), None
        if tail and shape.gathers and (rows := drawing_rows(batch, self._tokens)) is not None:
            tiles, pieces, ((first, cut, _), *further) = self._plans.divide(0, rows)
            sizes = replace(
                shape, tokens=draws, sequences=draws, drawn=rows.drawn, draws=0, tiles=first, pieces=cut,
                further=tuple(further),
            )  # fmt: skip
            own = self._tail.write(0, rows, sizes, tiles, pieces), sizes
            self.tails += 1
        model = self._model
        model.forward(inputs, shape, own)
        if not draws:
            return np.zeros((0, self._spec.vocab), dtype=np.float32)
        model.head(model.normed(shape), model.weights.head, model.logits, draws)
        model.shared.logit_scale(model.logits, draws)
        padded = self.device.download(model.logits.address, (draws, padded_vocab(self._spec)), np.float32)
        return np.ascontiguousarray(padded[:, : self._spec.vocab])


def launch_models_on_host(patch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """Launchers of whole models launch on the host from now on; which kernels they did."""
    launched = run_models_on_host(patch, folder)
    patch.setattr(loading, "Dequantizer", HostDequantizer)
    patch.setattr(loading, "Staging", Staged)
    return launched


def logits_of(model: HostModel, batches: Sequence[StepBatch]) -> Floats:
    """The logits of some steps, one after the other."""
    return np.concatenate([model.logits(batch) for batch in batches])
