"""The runner on an NVIDIA GPU: `launch` queues a step and returns, `collect` waits for its tokens.

Steps in which every sequence decodes one token are replayed from CUDA graphs, padded to a batch size that has
one; other steps, with chunks of prompts, are launched kernel by kernel. All graphs are captured at the start:
a step that came for the first time would wait for milliseconds, and there are a hundred in a night. Tokens
that the host does not know yet never leave the GPU: they are taken from the slot where they were drawn.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import (
    FOUND,
    Drawn,
    IntArray,
    PageKind,
    StepBatch,
    masked_draws,
    wants_logprobs,
)
from nightmill.worker.runners.gpu.activations import LOGIT_ROWS, Activations
from nightmill.worker.runners.gpu.arithmetic import arithmetic_of
from nightmill.worker.runners.gpu.attention.choice import Attentions
from nightmill.worker.runners.gpu.catalogue import check_spec, sources_for
from nightmill.worker.runners.gpu.decode_graphs import DecodeGraphs
from nightmill.worker.runners.gpu.device.chosen import FIRST_GPU, ChosenGpu
from nightmill.worker.runners.gpu.device.compiler import compile_all
from nightmill.worker.runners.gpu.device.device import Device, DeviceLostError, KernelLaunchError
from nightmill.worker.runners.gpu.device.graphs import buckets
from nightmill.worker.runners.gpu.device.operands import ABSENT
from nightmill.worker.runners.gpu.feed_forward import ExpertLaunchers
from nightmill.worker.runners.gpu.kv_cache import PAGE, KvCache, kinds_layout
from nightmill.worker.runners.gpu.launches import USUAL_LAUNCHING, Launching, PendingLaunch
from nightmill.worker.runners.gpu.layers import Launchers, bind_layers
from nightmill.worker.runners.gpu.loading import load_predictor, load_weights
from nightmill.worker.runners.gpu.memory import RunnerSizes, allowed, spare_pages
from nightmill.worker.runners.gpu.mixers import Mixers
from nightmill.worker.runners.gpu.model import Model, Shared
from nightmill.worker.runners.gpu.planning import RunnerPlanner, prompt_grid, takes_tail
from nightmill.worker.runners.gpu.precision import HALF, Precision
from nightmill.worker.runners.gpu.predicting import CudaPredictor, can_predict
from nightmill.worker.runners.gpu.products.chooser import Products
from nightmill.worker.runners.gpu.products.formats import ModelFormats
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.rows.layer_inputs import LayerInputRows
from nightmill.worker.runners.gpu.rows.logits import LogitScale
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.rows.pooling import PooledSums
from nightmill.worker.runners.gpu.rows.predictor import PredictorRows, Sizing
from nightmill.worker.runners.gpu.sampling.masks import MaskBuffers
from nightmill.worker.runners.gpu.sampling.sampler import Sampler
from nightmill.worker.runners.gpu.sampling.slots import SlotTable
from nightmill.worker.runners.gpu.self_test import check_products, checked_products
from nightmill.worker.runners.gpu.shapes import MANY_ROWS
from nightmill.worker.runners.gpu.states.memory import States
from nightmill.worker.runners.gpu.step_inputs import StepShape
from nightmill.worker.runners.gpu.steps import StepBuffers
from nightmill.worker.runners.gpu.tail import TailSteps
from nightmill.worker.runners.gpu.weights.choice import choose_weights
from nightmill.worker.runners.gpu.weights.layout import padded_vocab
from nightmill.worker.runners.starting import Progress, SelfTestError, StartStep, no_progress

__all__ = ["CudaRunner"]

log = logging.getLogger(__name__)

_MOST_ROWS = 65_535  # of a grid: attention has a row of blocks for each piece of a context, and of a prompt


class CudaRunner:
    """Runs steps on one GPU; belongs to the thread that made it.

    file, spec  the model
    sizes       how much is computed at once, and the memory for it
    precision   formats of weights, activations, keys and values
    launching   how steps are launched
    report      told what is being done, for a person who waits
    progress    told the steps of the start, each before it begins

    Raises RunnerError (CudaError, KernelCompileError, ...) where the GPU, the toolkit or the memory does not
    suffice, ModelFileError for weights that it cannot compute with.
    """

    def __init__(
        self, file: GgufFile, spec: ModelSpec, sizes: RunnerSizes, *, gpu: ChosenGpu = FIRST_GPU,
        precision: Precision = HALF, launching: Launching = USUAL_LAUNCHING,
        report: Callable[[str], None] = log.info, progress: Progress = no_progress,
    ) -> None:  # fmt: skip
        slots, max_tokens = sizes.slots, sizes.max_tokens
        if max_tokens < slots:
            raise ValueError(f"a step of {max_tokens} tokens cannot hold one token of each of {slots} slots")
        began = time.monotonic()
        self.page_size = PAGE
        self.page_kinds: tuple[PageKind, ...] = ()
        self.slots = slots
        self.depth = sizes.depth
        self.embeds = True
        self.prompt_grid, self.snapshots = prompt_grid(spec), 0
        self.vocab = spec.vocab
        self._row_of_logits = padded_vocab(spec)
        self.max_tokens = max_tokens
        self._context = min(sizes.context, spec.context_length)
        self._report = report
        self._progress = progress
        self._pending: deque[PendingLaunch] = deque()
        self._graphs: DecodeGraphs | None = None
        self._waits_for_masks = False
        self._tune = launching.tune
        self._turn = 0
        self._products: Products | None = None
        self._predictor: CudaPredictor | None = None
        self.device = Device(gpu.index, precision.element, precision.kv, pretended=gpu.pretended)
        try:
            self.arithmetic = arithmetic_of(file, self.device, precision)
            products = self._build(file, spec, precision, sizes)
            if launching.graphs and spec.encoder is None:  # which draws nothing
                self._capture_all()
            self._progress(StartStep.SELF_TEST, "")
            checked = list(checked_products(self.device, self._model, spec, file))
            check_products(self.device, checked, lambda news: self._progress(StartStep.SELF_TEST, news))
            if self._tune:
                products.clock.keep()  # so that the next start need not time them
        except BaseException as error:  # Ctrl-C too, while it loads: the GPU is given back, and it goes on up
            self._give_up(error)
            raise
        report(
            f"GPU {gpu.index} ({self.device.name}) is ready after {time.monotonic() - began:.1f} s: "
            f"{self.memory}"
        )

    def _build(self, file: GgufFile, spec: ModelSpec, precision: Precision, sizes: RunnerSizes) -> Products:
        device, context, gpu_memory = self.device, self._context, sizes.gpu_memory
        precision, why = choose_weights(spec, precision, allowed(device.free_memory(), gpu_memory))
        self._report(f"weights {why}")
        self.precision = precision  # as they were chosen
        check_spec(spec, precision, device)
        formats = ModelFormats(spec, precision)
        self.predicts = sizes.predicts and can_predict(spec, precision)
        sources = sources_for(spec, precision, hopper=device.hopper, predicts=self.predicts)
        self._progress(StartStep.COMPILING, "")
        made = compile_all(sources, device.architecture, report=self._compiled)
        device.cubins = dict(zip(sources, made, strict=True))  # so that none is read again for each module
        self._progress(StartStep.STARTING, "planning the memory")
        free = device.free_memory()
        attentions = Attentions(device, spec, max_context=context)
        self._plans = attentions.plans
        rows = max(sizes.max_tokens, self._plans.most_rows(sizes.slots))
        if rows > _MOST_ROWS:
            raise RunnerError(
                f"{sizes.slots:,} sequences in steps of up to {sizes.max_tokens:,} tokens may need {rows:,} "
                f"rows of blocks in one launch; a GPU takes {_MOST_ROWS:,}: lower --max-sequences"
            )
        planner = RunnerPlanner(
            spec, precision, device.multiprocessors, self._plans.most_pieces, hopper=device.hopper,
            predicts=self.predicts,
        )  # fmt: skip
        plan = planner.plan(replace(sizes, context=context), free)
        self.memory, bounds = plan.memory, plan.bounds
        self.max_tokens, self.max_draws = bounds.max_tokens, bounds.max_draws
        self.slots = slots = bounds.slots
        self.kv_pages, self.snapshots = self.memory.kv_pages, self.memory.states.snapshots
        draws = {"max_tokens": self.max_tokens, "max_draws": self.max_draws}
        self._report(f"memory of {device.name}: {self.memory}")
        self._plans.reserve(slots=slots, max_context=context, max_tokens=self.max_tokens, depth=self.depth)
        at = Activations.allocate(device, spec, precision, **draws)
        norms, activate = Norms(device, spec), Activate(device)
        self._products = products = formats.products(device, activate, at.gate_up, at.quantised)
        self._progress(StartStep.LOADING, "")
        weights = load_weights(device, file, spec, precision, report=self._report)
        of_block = load_predictor(device, file, spec, precision, weights) if self.predicts else None
        self._progress(StartStep.STARTING, "binding the layers")
        layout = kinds_layout(spec, device.kv)
        self.page_kinds = () if layout is None else layout.kinds
        pages = self.kv_pages + spare_pages(layout)
        cache = KvCache.allocate(device, spec, pages)
        self._states = States(device, spec, slots=slots, snapshots=self.snapshots, depth=self.depth)
        mixers = Mixers(device, spec, products, activate, attentions, at, max_context=context)
        experts = ExpertLaunchers.of(device, spec, precision, norms, padding=slots)
        launchers = Launchers(products, norms, activate, mixers, experts)
        layers = bind_layers(device, spec, weights, cache, self._states, at, launchers)
        sampler = Sampler(device, spec.vocab, max_rows=LOGIT_ROWS)
        self._slots = SlotTable(device, sampler, slots=slots, vocab=spec.vocab, depth=self.depth)
        self._masks = MaskBuffers(device, vocab=spec.vocab, rows=LOGIT_ROWS, depth=self.depth)
        self._steps = StepBuffers(device, bounds, padding_page=pages - 1, depth=self.depth)
        self._tail: TailSteps | None = None
        if takes_tail(spec, precision):
            buffers = StepBuffers(device, bounds.tail, padding_page=pages - 1, depth=self.depth)
            self._tail = TailSteps(buffers, self._plans, slots)
        embedding = Embedding(device, spec.vocab, spec.embedding_scale)
        given = None if spec.layer_inputs is None else LayerInputRows(device, spec)
        sizing = Sizing(
            self.max_tokens, self.max_draws, slots, bounds.table_width, self._context, pages, self.depth
        )
        predicting = PredictorRows(device, spec.width, sizing) if self.predicts else None
        drawing = ABSENT if predicting is None else predicting.normed
        shared = Shared(embedding, norms, LogitScale(device, spec), sampler, given, drawing)
        self._pooled = PooledSums(device, spec, slots=slots, depth=self.depth)
        self._model = Model(spec, weights, shared, layers, products, self._slots.address, cache.tokens, at)
        if predicting is not None and of_block is not None:
            self._predictor = CudaPredictor(
                device, spec, of_block, predicting, self._model, launchers, self._plans
            )
        self._drawn = [device.pinned(self.max_draws, np.int32) for _ in range(self.depth)]
        self._found = [device.pinned(self.max_draws, FOUND) for _ in range(self.depth)]
        self._done: list[Any] = [device.event() for _ in range(self.depth)]
        device.cubins.clear()
        if self._tune:
            self._tune_many_rows(MANY_ROWS if spec.encoder is None else LOGIT_ROWS)
        return products

    def launch(self, batch: StepBatch) -> None:
        """Queue a step. Raises RunnerError where it is too large or the GPU refuses."""
        if len(self._pending) >= self.depth:
            raise RunnerError(f"{self.depth} launches are outstanding already: collect one first")
        if self._waits_for_masks:
            raise RunnerError("the newest launch waits for its masks")
        if len(batch.tokens) > self.max_tokens:
            raise RunnerError(
                f"a step of {len(batch.tokens)} tokens is more than the {self.max_tokens} that the GPU's "
                "workspace was planned for"
            )
        draws = len(batch.draws) + int(batch.pools["rows"].sum())
        if len(batch.slots) > self.slots or draws > self.max_draws:
            raise RunnerError(
                f"{len(batch.slots)} sequences and {draws} draws are more than the runner's "
                f"{self.slots} slots and {self.max_draws} draws"
            )
        turn, self._turn = self._turn, (self._turn + 1) % self.depth
        self._slots.admit(batch.admissions, turn)
        self._states.begin(batch, turn)
        self._waits_for_masks = len(masked_draws(batch.draws)) > 0
        if self._graphs is not None and len(batch.slots) == batch.drawn == len(batch.draws):
            launch = self._replay(self._graphs, turn, batch)
        else:
            launch = self._launch_kernels(turn, batch)
        self._states.save(batch.snapshots, turn)
        if self._predictor is not None:
            launch = replace(launch, batch=batch)
        self._pending.append(launch)
        if not self._waits_for_masks:
            self._return_tokens(launch)

    def mask_room(self, count: int) -> IntArray:
        """Pinned memory for the masks of the newest launch."""
        return self._masks.room(self._pending[-1].turn, count)

    def draw(self, masks: IntArray) -> None:
        """Queue the draws of the newest launch. Raises RunnerError where it does not wait for masks."""
        if not self._waits_for_masks:
            raise RunnerError("no launch waits for masks")
        self._waits_for_masks = False
        launch = self._pending[-1]
        staged = self._masks.stage(launch.turn, launch.draws, masks)
        self._model.draw(
            launch.inputs,
            launch.shape,
            staged,
            adjusted=launch.adjusted,
            logprobs=launch.logprobs,
        )
        self._return_tokens(launch)

    def collect(self) -> Drawn | None:
        """Wait for the oldest launch. Raises RunnerError where the GPU failed."""
        if not self._pending:
            return None
        if self._waits_for_masks and len(self._pending) == 1:
            raise RunnerError("the oldest launch waits for its masks")
        launch = self._pending.popleft()
        count = len(launch.draws)
        self.device.wait(self._done[launch.turn], f"a step that draws {count} tokens")
        found = self._found[launch.turn][:count].copy() if launch.logprobs else None
        sums, guesses = self._pooled.told(launch.turn, launch.sums), None
        if self._predictor is not None:
            guesses = self._predictor.told(launch.turn, launch.guesses, count)
        return Drawn(self._drawn[launch.turn][:count].copy(), found, sums, guesses)

    def _return_tokens(self, launch: PendingLaunch) -> None:
        """Queue the guesses behind what the newest launch draws, and the copies of all that it gives."""
        if count := len(launch.draws):
            self.device.copy_out(self._drawn[launch.turn][:count], self._model.drawn.address)
        if launch.logprobs:
            self.device.copy_out(self._found[launch.turn][:count], self._model.found.address)
        self._pooled.tell(launch.turn, launch.sums, self._model.residual)
        if self._predictor is not None and launch.batch is not None:
            guesses = self._predictor.follow(launch.turn, launch.batch, launch.inputs, launch.shape)
            self._pending[-1] = replace(launch, guesses=guesses)
        self._done[launch.turn].record(self.device.stream)

    def logits(self, rows: int) -> np.ndarray:
        """The logits of the `rows` rows that the last launch drew from, float32 (rows, vocab); for tests.

        Only the last LOGIT_ROWS are kept on the device; waits for it.
        """
        assert rows <= LOGIT_ROWS
        logits = self.device.download(self._model.logits.address, (rows, self._row_of_logits), np.float32)
        return np.ascontiguousarray(logits[:, : self.vocab])

    def products(self) -> dict[str, dict[int, str]]:
        """Names of the kernels that are taken, by product and number of rows; for a person."""
        return {} if self._products is None else self._products.tuned()

    def close(self) -> None:
        """Release the GPU; safe to call twice."""
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
        self._pending.clear()
        if self._products is not None:
            self._products.close()
            self._products = None
        self.device.close()

    def _give_up(self, error: BaseException) -> None:
        kernels_fail = isinstance(error, (SelfTestError, DeviceLostError, KernelLaunchError))
        if self._products is not None and kernels_fail:
            self._products.clock.remembered.distrust()
        self.close()

    def _compiled(self, news: str) -> None:
        """A kernel is compiled; called on threads that compile."""
        log.info("%s", news)
        self._progress(StartStep.COMPILING, news)

    def _tune_many_rows(self, least: int) -> None:
        """Choose how steps of over `least` tokens are multiplied: of the most there can be, a half ..."""
        rows = self.max_tokens
        while rows > least:
            self._progress(StartStep.TUNING, f"{rows:,} rows")
            self._tune_rows(rows, 1)
            rows //= 2

    def _tune_rows(self, rows: int, draws: int) -> None:
        self._model.tune(rows, draws)
        if self._predictor is not None:
            self._predictor.tune(rows)

    def _capture_all(self) -> None:
        """Every batch size, with every number of pieces that its contexts may be shared out in."""
        began, free = time.monotonic(), self.device.free_memory()
        self._graphs = graphs = DecodeGraphs(self.device, self._model, self._plans, self._steps, self.slots)
        for size in reversed(buckets(self.slots)):
            if self._tune:
                self._progress(StartStep.TUNING, f"{size:,} rows")
                self._tune_rows(size, size)
            self._progress(StartStep.CAPTURING, f"{size:,} sequences")
            graphs.capture(size, self._turn)
        self.device.synchronize()
        self._report(
            f"captured {len(graphs.usual)} decode graphs in {time.monotonic() - began:.1f} s; they take "
            f"{(free - self.device.free_memory()) >> 20:,} MiB"
        )

    def _replay(self, graphs: DecodeGraphs, turn: int, batch: StepBatch) -> PendingLaunch:
        """Queue a step in which every token was drawn or guessed, and is followed by a draw."""
        adjusted, logprobs = self._slots.adjusts(batch.draws), wants_logprobs(batch.draws)
        apart = adjusted or logprobs or self._waits_for_masks
        inputs, shape = graphs.launch(turn, batch, draws=not apart, next_turn=self._turn)
        if apart and not self._waits_for_masks:
            self._model.draw(inputs, shape, adjusted=adjusted, logprobs=logprobs)
        return PendingLaunch(turn, batch.draws, inputs, shape, adjusted, logprobs)

    def _launch_kernels(self, turn: int, batch: StepBatch) -> PendingLaunch:
        """Queue a step of any composition."""
        drawn, pooled = batch.drawn, int(batch.pools["rows"].sum())
        tiles, pieces, ((first, cut, groups), *further) = self._plans.divide(turn, batch)
        shape = StepShape(
            tokens=len(batch.tokens),
            sequences=len(batch.slots),
            drawn=drawn,
            draws=len(batch.draws) + pooled,
            tiles=first,
            pieces=cut,
            again=drawn > 0 and len(np.unique(batch.slots)) < len(batch.slots),
            given=pooled > 0 or bool((batch.draws["slot"] < 0).any()),
            pooled=pooled,
            whole=self._predictor is not None,
            groups=groups,
            further=tuple(further),
        )
        inputs = self._steps.write(turn, batch, shape, tiles, pieces)
        tail = None if self._tail is None else self._tail.write(turn, batch, shape)
        adjusted, logprobs = self._slots.adjusts(batch.draws), wants_logprobs(batch.draws)
        self._model.forward(inputs, shape, tail)
        self._pooled.add(turn, batch.pools, self._model.normed(shape), len(batch.draws), self._model.residual)
        if not self._waits_for_masks:
            self._model.draw(inputs, shape, adjusted=adjusted, logprobs=logprobs)
        sums = int(batch.pools["ends"].sum())
        return PendingLaunch(turn, batch.draws, inputs, shape, adjusted, logprobs, sums)
