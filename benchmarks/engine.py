"""Measure the engine on the GPU, without Celery: random token ids, no end-of-text, tokens per second.

    python -m benchmarks.engine MODEL.gguf [--weights 16bit] [--kv 16bit] [--repeat 3] [single uniform ...]

Prints one JSON line a workload: the median over the repetitions, after one that is not counted, and the limit
of what memory and arithmetic of an H200 allow (`tests.support.limits`). --quick is
for when a GPU's time is scarce: all workloads on one runner with room for each, and before what is counted
only two steps of prompts and some tokens.
--constrained none,one,same,all does so for each of these, on one runner: no answer is held to a JSON schema,
the first alone, all to one, each to one of its own.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common.constrained_requests import WHICH, ConstrainedRequests
from benchmarks.common.options import add_formats, precision_from
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.link.garbage import QuietCollector
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Pooling
from nightmill.worker.runners.base import Runner
from nightmill.worker.runners.gpu.device.chosen import ChosenGpu
from nightmill.worker.runners.gpu.launches import Launching
from nightmill.worker.runners.gpu.memory import RunnerSizes
from nightmill.worker.runners.gpu.runner import CudaRunner
from tests.support.engines import NoText
from tests.support.limits import Limit


@dataclass(frozen=True)
class Workload:
    """`sequences` requests with prompts and answers of lengths drawn evenly between two bounds.

    shared_prefix: tokens that come before every prompt, the same for all. pooling: nothing is drawn, but an
    embedding made of hidden states; encoders take `encode` and `encode-short`, other models the rest.
    """

    sequences: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    temperature: float
    slots: int
    token_budget: int
    counts_prompts: bool = False
    shared_prefix: int = 0
    logprobs: int | None = None
    pooling: Pooling | None = None

    def requests(self, vocab: int, seed: int) -> list[Request]:
        rng = np.random.default_rng(seed)
        prompts = rng.integers(self.prompt[0], self.prompt[1], self.sequences, endpoint=True)
        answers = rng.integers(self.answer[0], self.answer[1], self.sequences, endpoint=True)
        prefix = rng.integers(0, vocab, self.shared_prefix).tolist()
        return [
            Request(
                f"{seed}-{index}", 1, (*prefix, *rng.integers(0, vocab, prompt).tolist()),
                GenerationParams(
                    max_tokens=int(answer), temperature=self.temperature, ignore_eos=True,
                    logprobs=self.logprobs, embed=self.pooling is not None,
                ),
                seed=seed * 100_003 + index,
                embeds=None if self.pooling is None else self.pooling.places(int(prompt)),
            )
            for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]  # fmt: skip

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return self.shared_prefix + self.prompt[1] + self.answer[1]

    def begun(self) -> "Workload":
        """So many of its sequences that two steps compute their prompts, with a few tokens each."""
        few = math.ceil(2 * self.token_budget / (self.shared_prefix + self.prompt[1]))
        return replace(
            self, sequences=min(self.sequences, few), answer=(1, 1) if self.counts_prompts else (8, 8)
        )


WORKLOADS = {
    "single": Workload(1, (128, 128), (256, 256), 0.0, 1, 2048),
    "uniform": Workload(256, (512, 512), (256, 256), 0.6, 256, 8192),
    "mixed": Workload(256, (100, 1024), (100, 1024), 0.6, 256, 8192),
    "wide": Workload(1024, (512, 512), (256, 256), 0.6, 1024, 16384),
    "nightly": Workload(4096, (64, 512), (64, 256), 0.7, 2048, 16384),
    "prefill": Workload(512, (1024, 1024), (1, 1), 0.0, 512, 16384, counts_prompts=True),
    "shared": Workload(256, (16, 64), (32, 32), 0.7, 256, 8192, shared_prefix=1000),
    "batch64": Workload(64, (512, 512), (256, 256), 0.6, 64, 8192),
    "prefill128": Workload(128, (1024, 1024), (1, 1), 0.0, 128, 16384, counts_prompts=True),
    "night1024": Workload(1024, (64, 512), (64, 256), 0.7, 1024, 16384),
    "embed": Workload(4096, (64, 512), (1, 1), 0.0, 256, 16384, counts_prompts=True, pooling=Pooling.LAST),
    "embed-mean": Workload(
        1024, (64, 512), (1, 1), 0.0, 256, 16384, counts_prompts=True, pooling=Pooling.MEAN
    ),
    "embed-drawn": Workload(4096, (64, 512), (1, 1), 0.0, 256, 16384, counts_prompts=True),
    "encode": Workload(4096, (64, 508), (1, 1), 0.0, 256, 16384, counts_prompts=True, pooling=Pooling.CLS),
    "encode-short": Workload(
        16_384, (8, 64), (1, 1), 0.0, 1024, 16384, counts_prompts=True, pooling=Pooling.CLS
    ),
    "long": Workload(32, (31_744, 31_744), (255, 255), 0.6, 32, 16384),
}
STANDARD = ["single", "uniform", "mixed", "wide", "nightly", "prefill"]


@dataclass(frozen=True)
class Turn:
    """A workload, done once: the tokens that count, and how long they took."""

    tokens: int
    seconds: float
    stats: EngineStats

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def play(
    workload: Workload, runner: Runner, seed: int, *, slots: int, token_budget: int,
    prefix_sharing: bool = True, held: ConstrainedRequests | None = None, which: str = "none",
    encodes: bool = False,
) -> Turn:  # fmt: skip
    """Do a workload once, with requests drawn by `seed`, on a runner with room for it.

    held, which  holds the answers that are to be held
    encodes      the model is an encoder, whose texts are computed whole
    """
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(
            context_length=workload.context + 1,
            max_sequences=slots,
            token_budget=token_budget,
            encodes=encodes,
        ),
        prefix_sharing=prefix_sharing,
        constraints=None if held is None else held.grammars,
    )
    requests = workload.requests(runner.vocab, seed)
    if held is not None:
        requests = held.requests(requests, which)
    for request in requests:
        engine.submit(request)
    done = []
    with QuietCollector():  # as in a worker
        began = time.perf_counter()
        while engine.has_work:
            done += engine.step()
        seconds = time.perf_counter() - began
    assert len(done) == len(requests)
    assert all(completion.error is None for completion in done)
    tokens = sum(
        completion.prompt_tokens if workload.counts_prompts else completion.completion_tokens
        for completion in done
    )
    return Turn(tokens, seconds, engine.stats)


def figures(workload: Workload, turns: Sequence[Turn], limit: Limit) -> dict[str, object]:
    """What is printed of the turns that count."""
    last = turns[-1]
    requests = workload.requests(limit.spec.vocab, 1)
    prompts = [len(request.prompt_ids) - workload.shared_prefix for request in requests]
    answers = [request.params.max_tokens for request in requests]
    least = limit.workload([*prompts, workload.shared_prefix], [*answers, 1], workload.slots)
    rate = round(statistics.median(turn.rate for turn in turns))
    return {
        "prompt_tokens_per_s" if workload.counts_prompts else "output_tokens_per_s": rate,
        "all": [round(turn.rate) for turn in turns],
        "limit_tokens_per_s": (bound := round(sum(prompts if workload.counts_prompts else answers) / least)),
        "of_limit": round(rate / bound, 3),
        "tokens": last.tokens,
        "seconds": round(statistics.median(turn.seconds for turn in turns), 3),
        "prompt_tokens": last.stats.prompt_tokens,
        "shared_tokens": last.stats.shared_tokens,
        "steps": last.stats.steps,
        "preemptions": last.stats.preemptions,
    }


def in_ranges(ways: Mapping[int, str]) -> str:
    """What is the same for neighbouring numbers of rows, once: `1 to 8 split 16, 16 cuBLASLt`."""
    runs: list[tuple[list[int], str]] = []
    for rows, way in ways.items():
        if runs and runs[-1][1] == way:
            runs[-1][0].append(rows)
        else:
            runs.append(([rows], way))
    return ", ".join(f"{rows[0]:,}{f' to {rows[-1]:,}' if len(rows) > 1 else ''} {way}" for rows, way in runs)


def main() -> None:
    """Run the workloads that are asked for."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model")
    arguments.add_argument(
        "workloads", nargs="*", default=STANDARD, metavar="workload", help=", ".join(WORKLOADS)
    )
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--gpu", type=int, default=0)
    add_formats(arguments)
    arguments.add_argument("--depth", type=int, default=3)
    arguments.add_argument("--slots", type=int, help="sequences at once, instead of the workload's own")
    arguments.add_argument("--token-budget", type=int)
    arguments.add_argument("--quick", action="store_true", help="see above")
    arguments.add_argument("--no-graphs", action="store_true")
    arguments.add_argument("--no-prefix-sharing", action="store_true")
    arguments.add_argument("--products", action="store_true", help="print which kernel each product took")
    arguments.add_argument("--logprobs", type=int, help="likely tokens that are told with each")
    arguments.add_argument("--constrained", default="none", help=f"of {', '.join(WHICH)}: one or several")
    options = arguments.parse_intermixed_args()  # options may stand between workloads
    file = GgufFile.open(options.model)
    spec = read_spec(file)
    for names in [options.workloads] if options.quick else [[name] for name in options.workloads]:
        for found in measure(names, file, spec, options):
            print(json.dumps(found), flush=True)


def measure(
    names: Sequence[str], file: GgufFile, spec: ModelSpec, options: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """Run workloads on one runner, free and under constraints as is asked."""
    workloads = {name: asked_for(WORKLOADS[name], options) for name in names}
    every = workloads.values()
    if any(one.pooling is Pooling.MEAN for one in every):
        spec = replace(spec, pooling=Pooling.MEAN)  # for which the runner makes room
    began = time.perf_counter()
    runner = CudaRunner(
        file,
        spec,
        RunnerSizes(
            slots=max(one.slots for one in every),
            context=max(one.context for one in every) + 1,
            depth=options.depth,
            max_tokens=max(one.token_budget for one in every),
        ),
        launching=Launching(graphs=not options.no_graphs),
        gpu=ChosenGpu(options.gpu),
        precision=precision_from(options, file, spec),
        report=lambda line: print(line, file=sys.stderr),
    )
    ready = time.perf_counter() - began
    if options.products:
        for product, ways in runner.products().items():
            print(f"{product}: {in_ranges(ways)}", file=sys.stderr)
    limit = Limit(spec, runner.precision)
    constrained = options.constrained.split(",")
    held = None if constrained == ["none"] else ConstrainedRequests(file, spec.vocab)
    same: dict[str, Any] = {
        "prefix_sharing": not options.no_prefix_sharing,
        "held": held,
        "encodes": spec.encoder is not None,
    }
    try:
        for name, workload in workloads.items():
            budget = min(workload.token_budget, runner.max_tokens)
            slots = min(workload.slots, runner.slots)  # fewer have states where memory is short
            same |= {"slots": slots, "token_budget": budget}
            for which in constrained:
                play(workload.begun() if options.quick else workload, runner, 0, **same, which=which)
                turns = [
                    play(workload, runner, 1 + turn, **same, which=which) for turn in range(options.repeat)
                ]
                yield {
                    "workload": name,
                    "constrained": which,
                    "model": spec.name,
                    "gpu": runner.device.name,
                    "dtype": runner.precision.element.value,
                    "weights": runner.precision.weights.value,
                    "kv": runner.precision.kv.value,
                    **figures(workload, turns, limit),
                    "slots": slots,
                    "token_budget": budget,
                    "depth": options.depth,
                    "weights_gib": round(runner.memory.weights / 2**30, 2),
                    "states_gib": round(runner.memory.states.bytes / 2**30, 2),
                    "kv_pages": runner.kv_pages,
                    "ready_s": round(ready, 2),
                }
    finally:
        if held is not None:
            held.grammars.close()
        runner.close()


def asked_for(workload: Workload, options: argparse.Namespace) -> Workload:
    """As the options change it; a step has a token of every sequence at least."""
    slots = options.slots or workload.slots
    budget = max(options.token_budget or workload.token_budget, slots)
    return replace(workload, slots=slots, token_budget=budget, logprobs=options.logprobs)


if __name__ == "__main__":
    main()
