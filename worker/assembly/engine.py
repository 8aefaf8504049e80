"""From settings and an opened model file to an engine: a runner with the weights, sized for its device."""

import logging
import time
from contextlib import ExitStack
from dataclasses import replace

from threadpoolctl import threadpool_limits

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import SettingsError
from nightmill.worker.assembly.draft_model import build_draft_model
from nightmill.worker.assembly.model import LoadedModel, OpenModel, element_of
from nightmill.worker.assembly.shared_gpu import SharedGpu
from nightmill.worker.assembly.sizes import (
    PAGE_SIZE,
    REFERENCE,
    context_length,
    gpu_index,
    interactive_slots,
    max_sequences,
    precision_of,
    runner_sizes,
)
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.metering import Metering
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.probing import probe
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.grammar import Grammars
from nightmill.worker.model.tokenizer import TextStream
from nightmill.worker.runners.base import STATE_CHUNK, Runner
from nightmill.worker.runners.gpu.device.chosen import ChosenGpu
from nightmill.worker.runners.gpu.device.known_cards import known_card
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.kv_format import KvFormat
from nightmill.worker.runners.ranking import Ranker
from nightmill.worker.runners.reference import ReferenceRunner, Rounding, choose_kv_pages, choose_slots
from nightmill.worker.runners.starting import StartStep

log = logging.getLogger(__name__)


def build_engine(settings: Settings, model: OpenModel) -> Engine:
    """The runner with the weights, and the engine on it. Called in the process and thread that will run it.

    Raises RunnerError where the GPU cannot be used, ModelFileError for weights that do not suit it.
    """
    spec, sequences = model.spec, max_sequences(settings)
    context = context_length(settings, spec)
    gpu, pretended = gpu_index(settings), known_card(settings.pretend_device)
    if gpu is None and pretended is not None and not settings.reference:
        raise SettingsError(
            f"there is no GPU that could be taken for {pretended.name}: unset NIGHTMILL_PRETEND_DEVICE; "
            f"`nightmill check --pretend {pretended.key}` and `nightmill plan --no-measure` forecast without "
            "one"
        )
    model = with_grammars(model)  # which read the vocabulary while the runner loads
    vocabulary, grammars = model.vocabulary, model.grammars
    model.progress(StartStep.STARTING, "")
    chosen = None if gpu is None else ChosenGpu(gpu, pretended)
    with ExitStack() as undoing:  # also on Ctrl-C, which must not leave memory of the GPU behind
        draft = build_draft_model(settings, model, gpu=chosen, context=context)
        if draft is not None:
            undoing.callback(draft.close)
        runner, sequences, token_budget = _runner(
            settings, model, chosen, sequences=sequences, context=context
        )
        undoing.callback(runner.close)

        ranker = None if spec.ranking is None else Ranker(model.file, spec.ranking, spec.width)

        def engine(metering: Metering | None = None) -> Engine:
            return Engine(
                runner,
                Detokenizer(
                    text_stream=lambda: TextStream(vocabulary, strip_space=False),
                    eos_ids=vocabulary.eos_ids,
                    decode=vocabulary.decode,
                ),
                EngineSizes(
                    context_length=context,
                    max_sequences=sequences,
                    token_budget=token_budget,
                    interactive_slots=interactive_slots(sequences),
                    encodes=spec.encoder is not None,
                    model_context=spec.context_length,
                    rank=ranker,
                ),
                prefix_sharing=settings.prefix_sharing,
                constraints=grammars,
                drafts=Drafts(settings.drafts),
                metering=metering,
            )

        model.progress(StartStep.PROBING, "")
        probe(engine(), spec.vocab)  # by an engine of its own, which counts for itself
        undoing.pop_all()
    made = engine(_metering(None if gpu is None else GpuProbe(gpu), model.ledger))
    if draft is not None:
        made.guess_by(draft)
    return made


def with_grammars(model: OpenModel) -> OpenModel:
    """The model with all that is made of its vocabulary alone, without a GPU; grammars on a thread."""
    if model.grammars is not None:
        return model
    model.vocabulary.spell_all()
    return replace(model, grammars=Grammars(model.vocabulary, model.spec.vocab))


def import_gpu_runner() -> None:
    """Import what builds an engine on a GPU, if it is installed, without taking anything of one.

    Raises CompilerMissingError.
    """
    from nightmill.worker.runners.gpu.device.device import import_packages

    if import_packages():
        import nightmill.worker.assembly.forecast
        import nightmill.worker.assembly.speed
        import nightmill.worker.runners.gpu.runner  # noqa: F401
        from nightmill.worker.runners.gpu.arithmetic import ask_releases

        ask_releases()


def _metering(counter: GpuProbe | None, ledger: int | None) -> Metering:
    if ledger is None:
        return Metering(counter, time.monotonic)
    shared = SharedGpu(ledger, counter)
    return Metering(None if counter is None else shared, shared.clock, shared)


def _runner(
    settings: Settings, model: OpenModel, chosen: ChosenGpu | None, *, sequences: int, context: int
) -> tuple[Runner, int, int]:
    """The runner of a model, its sequences at once, and the most tokens of a step."""
    spec = model.spec
    if chosen is None:
        sequences = choose_slots(spec, sequences)
        token_budget = REFERENCE.tokens_of_a_step(sequences + STATE_CHUNK)
        if spec.encoder is not None:
            token_budget = max(token_budget, context)
        runner = _reference_runner(settings, model, sequences=sequences, context=context)
        return runner, sequences, token_budget
    from nightmill.worker.assembly.forecast import forecast_of
    from nightmill.worker.assembly.speed import GpuSpeed
    from nightmill.worker.runners.gpu.runner import CudaRunner

    cuda = CudaRunner(
        model.file,
        spec,
        replace(runner_sizes(settings, spec), predicts=settings.drafts != "off"),
        gpu=chosen,
        precision=replace(precision_of(settings, model.file, spec), plain_products=model.plain_products),
        progress=model.progress,
    )
    found = forecast_of(
        spec,
        GpuSpeed(cuda.device.peaks(), cuda.device.multiprocessors),
        cuda.precision,
        cuda.memory,
        context=context,
    )
    log.info("a KV cache in %s has room for %s", cuda.precision.kv_name.upper(), found.room)
    return cuda, cuda.slots, cuda.max_tokens


def _reference_runner(
    settings: Settings, model: OpenModel, *, sequences: int, context: int
) -> ReferenceRunner:
    # The products of a step are too small to share: with two BLAS threads on two busy cores, 32 sequences of
    # the demo model generated 74 tokens/s, with one thread 620 (the threads wait for each other by spinning).
    threadpool_limits(limits=1, user_api="blas")
    runner = ReferenceRunner(
        model.file,
        model.spec,
        kv_pages=choose_kv_pages(model.spec, max_sequences=sequences, context=context, page_size=PAGE_SIZE),
        page_size=PAGE_SIZE,
        slots=sequences,
        rounding=Rounding(KvFormat(settings.kv), WeightsFormat(settings.weights).rounded is not None),
    )
    if settings.drafts != "off":
        runner.predict()
    return runner


def describe(settings: Settings, model: LoadedModel, stats: EngineStats) -> str:
    """One line for the log: what serves what, and how much of it."""
    spec = model.spec
    sequences = stats.sequences
    gpu = gpu_index(settings)
    if gpu is None:
        weights = WeightsFormat(settings.weights)
        kept = Precision(
            weights=WeightsFormat.ELEMENT if weights.rounded is None else weights,
            kv=KvFormat(settings.kv),
        ).words
        runner = f"reference runner (NumPy){kept and f', {kept}'}"
    else:
        kept = precision_of(settings, model.file, spec).words
        runner = f"CUDA runner on GPU {gpu} in {element_of(settings, model)}{kept and f', {kept}'}"
    states = f", each with a state of {spec.state_bytes:,} bytes" if spec.state_bytes else ""
    return (
        f"{model.name}: {spec.family}, {len(spec.layers)} layers of width {spec.width}, vocabulary "
        f"{spec.vocab:,}; {runner}, up to {sequences} sequences of "
        f"{context_length(settings, spec):,} tokens{states}, KV cache of {stats.cache_tokens:,} tokens"
    )
