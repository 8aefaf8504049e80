"""Workers with an engine of one's own: a module is the worker and, for that, the process of its engine."""

import sys
from collections.abc import Callable
from dataclasses import replace

import nightmill.worker.link.launching
import nightmill.worker.link.process
from nightmill.jobs.base.arithmetic import DIGITS
from nightmill.jobs.base.settings import Settings
from nightmill.worker.assembly.model import OpenModel
from nightmill.worker.assembly.sizes import max_sequences
from nightmill.worker.commands.serving import worker
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.model.tokenizer import TextStream
from nightmill.worker.runners.base import Runner

__all__ = ["BuildEngine", "engine_on", "run_module"]

BuildEngine = Callable[[Settings, OpenModel], Engine]


def run_module(name: str, build: BuildEngine, serve: Callable[[], object] = worker.main) -> None:
    """What `python -m NAME` does: be a worker, or (`python -m NAME engine FD`) the process of its engine.

    build  makes the engine
    serve  runs the worker, or whatever starts one
    """
    if sys.argv[1:2] == ["engine"]:
        nightmill.worker.link.process.build_engine = build
        sys.exit(nightmill.worker.link.process.main())
    nightmill.worker.link.launching.ENGINE_COMMAND = (sys.executable, "-m", name, "engine")
    serve()


def engine_on(
    runner: Runner,
    settings: Settings,
    model: OpenModel,
    *,
    context: int,
    token_budget: int = 16384,
    interactive: int = 0,
) -> Engine:
    """The real engine, scheduler and detokenizer on a runner of one's own, whose texts are of this file."""
    runner.arithmetic = replace(runner.arithmetic, model=model.file.digest()[:DIGITS])
    return Engine(
        runner,
        Detokenizer(
            text_stream=lambda: TextStream(model.vocabulary, strip_space=False),
            eos_ids=model.vocabulary.eos_ids,
            decode=model.vocabulary.decode,
        ),
        EngineSizes(
            context_length=context,
            max_sequences=max_sequences(settings),
            token_budget=token_budget,
            interactive_slots=interactive,
        ),
    )
