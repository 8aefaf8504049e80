"""How the engine scales on the GPU: from 1 to 4,096 sequences, and from contexts of 128 to 32,000 tokens.

    python -m benchmarks.scaling MODEL.gguf [--sequences 1 64 1024] [--contexts 512 8192] > scaling.jsonl
    python -m benchmarks.plot scaling.jsonl -o docs/throughput.svg

Random token ids, no end-of-text. Prints one JSON line a point (`Point`): a median of the repetitions, before
which the GPU does two steps of such prompts and some tokens of their answers; a point whose sequences do not
fit the model or the GPU all at once is left out.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from benchmarks.common.options import add_formats, precision_from
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.link.garbage import QuietCollector
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import Runner
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.engines import NoText
from tests.support.limits import BYTES_PER_S, FLOPS, Limit

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PROMPT, ANSWER = 512, 256
CONTEXTS = (128, 512, 2048, 8192, 32000)
LONG_SEQUENCES, LONG_STEPS = 32, 64
TOKEN_BUDGET = 16384
WARM_STEPS, WARM_ANSWER = (
    2,
    16,
)  # steps of prompts that come before what is timed, and tokens of their answers


Series = Literal["sequences", "contexts"]


class Point(BaseModel):
    """One measurement. `context`: mean tokens of a sequence in the steps that the decode rate is of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    series: Series
    sequences: PositiveInt
    prompt: PositiveInt
    answer: PositiveInt
    context: PositiveInt
    output_tokens_per_s: PositiveFloat | None  # all output over the whole time, prompts included
    decode_tokens_per_s: PositiveFloat  # while all sequences decode
    limit_tokens_per_s: PositiveFloat  # `Limit.decoding`
    model: str
    formats: str
    """What is not in 16 bits (`Precision.words`)."""
    gpu: str


class Load(NamedTuple):
    """What is computed at once: so many sequences, and tokens of each prompt and each answer."""

    sequences: int
    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"{self.sequences:,} sequences of {self.prompt:,} + {self.answer:,} tokens"

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        return self.prompt + self.answer


class Run(NamedTuple):
    """What `measure` found: tokens per second, and the mean context while all sequences decoded."""

    output: float
    decode: float
    context: float


def main() -> None:
    """Both series."""
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--repeat", type=int, default=1)
    arguments.add_argument("--sequences", type=int, nargs="*", default=SEQUENCES)
    arguments.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    add_formats(arguments)
    arguments.add_argument("--bytes-per-s", type=float, default=BYTES_PER_S)
    arguments.add_argument("--flops", type=float, default=FLOPS)
    options = arguments.parse_args()
    file = GgufFile.open(options.model)
    spec = read_spec(file)
    load_of: dict[Series, list[Load]] = {
        "sequences": [Load(count, PROMPT, ANSWER) for count in options.sequences],
        "contexts": [long_load(context) for context in options.contexts],
    }
    for series, loads in load_of.items():
        load_of[series] = [load for load in loads if load.tokens < spec.context_length]
    every = [load for loads in load_of.values() for load in loads]
    if not every:
        raise SystemExit(f"no sequences fit into the model's context of {spec.context_length:,} tokens")
    runner = CudaRunner(
        file,
        spec,
        RunnerSizes(
            slots=max(load.sequences for load in every),
            context=max(load.tokens for load in every) + 1,
            depth=3,
            max_tokens=TOKEN_BUDGET,
        ),
        precision=precision_from(options, file, spec),
        report=lambda line: print(line, file=sys.stderr),
    )
    try:
        for series, loads in load_of.items():
            for load in loads:
                if load.sequences * -(-load.tokens // runner.page_size) > runner.kv_pages:
                    print(f"{load} do not fit", file=sys.stderr)
                    continue
                point = point_of(series, load, runner, spec, options)
                print(point.model_dump_json(), flush=True)
    finally:
        runner.close()


def long_load(context: int) -> Load:
    """Sequences, prompt and answer for which `context` is the mean while all of them decode.

    The first of them draw already while the last prompts are computed: the answer is longer by those steps.
    """
    answer = LONG_STEPS + math.ceil(LONG_SEQUENCES * context / (TOKEN_BUDGET - LONG_SEQUENCES))
    return Load(LONG_SEQUENCES, context - answer // 2, answer)


def point_of(
    series: Series, load: Load, runner: CudaRunner, spec: ModelSpec, options: argparse.Namespace
) -> Point:
    """Measure one load on a runner that others were measured on, too."""
    few = min(load.sequences, math.ceil(WARM_STEPS * TOKEN_BUDGET / load.prompt))
    measure(runner, load._replace(sequences=few, answer=WARM_ANSWER), options.repeat, time.perf_counter)
    runs = [measure(runner, load, turn, time.perf_counter) for turn in range(options.repeat)]
    run = Run(*(statistics.median(values) for values in zip(*runs, strict=True)))
    limit = Limit(spec, runner.precision, options.bytes_per_s, options.flops)
    return Point(
        series=series, sequences=load.sequences, prompt=load.prompt, answer=load.answer,
        context=round(run.context), output_tokens_per_s=round(run.output),
        decode_tokens_per_s=round(run.decode),
        limit_tokens_per_s=round(limit.decoding(load.sequences, run.context)),
        model=spec.name, formats=runner.precision.words, gpu=runner.device.name,
    )  # fmt: skip


def measure(runner: Runner, load: Load, seed: int, clock: Callable[[], float]) -> Run:
    """Compute random prompts and their answers.

    The decode rate is of the steps in which all sequences decode: from when the last prompt is computed, not
    only launched, until the first answer ends.
    """
    count, prompt, answer = load
    draw = np.random.default_rng(seed)
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=load.tokens + 1, max_sequences=count, token_budget=TOKEN_BUDGET),
        prefix_sharing=False,
    )
    for number in range(count):
        params = GenerationParams(max_tokens=answer, temperature=0.6, ignore_eos=True)
        tokens = tuple(draw.integers(0, runner.vocab, prompt).tolist())
        engine.submit(Request(f"{seed}-{number}", 1, tokens, params, seed=number))
    done = []
    prompts_launched: int | None = None  # in this step the last of them
    begin = finish = (0.0, 0)  # time and tokens drawn
    with QuietCollector():  # as in a worker
        began = clock()
        while engine.has_work:
            done += engine.step()
            stats = engine.stats
            if prompts_launched is None and stats.prompt_tokens == count * prompt:
                prompts_launched = stats.steps
            if (
                not begin[1]
                and prompts_launched is not None
                and stats.steps - prompts_launched == runner.depth - 1
            ):
                begin = clock(), stats.generated_tokens
            if not finish[1] and done:
                finish = clock(), stats.generated_tokens
        seconds = clock() - began
    assert [completion.error for completion in done] == [None] * count
    assert not engine.stats.preemptions
    assert 0 < begin[1] < finish[1], "there was no step in which all sequences decoded"
    return Run(
        output=count * answer / seconds,
        decode=(finish[1] - begin[1]) / (finish[0] - begin[0]),
        context=prompt + (begin[1] + finish[1]) / 2 / count,
    )


if __name__ == "__main__":
    main()
