"""Measure what a step costs the host: planning, building the batch, applying tokens; nothing is computed.

    python -m benchmarks.scheduling [--running 1024] [--waiting 4096] [--steps 200] [--no-prefix-sharing]

Prints one JSON line: milliseconds a step, the median and the worst, while every running sequence decodes.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from nightmill.jobs.arithmetic import Arithmetic
from nightmill.jobs.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.request import Request
from nightmill.worker.runners.base import Drawn, IntArray, StepBatch
from tests.engines import NoText

PROMPT, ANSWER, VOCAB = 256, 512, 32_000


class NoRunner:
    """Draws token 65 for every row at once."""

    block_size = 16
    depth = 3
    vocab = VOCAB
    arithmetic = Arithmetic(
        runner="none", device="none", weights="none", kv="none", kernels="none", model="none"
    )

    def __init__(self, slots: int) -> None:
        self.slots = self.max_draws = slots
        self.kv_blocks = slots * (PROMPT + ANSWER) // self.block_size + slots
        self._drawn: deque[Drawn] = deque()

    def launch(self, batch: StepBatch) -> None:
        """Draw as many as the step does."""
        self._drawn.append(Drawn(np.full(len(batch.draws), 65, dtype=np.int32)))

    def mask_room(self, count: int) -> IntArray:
        """Nothing is masked."""
        raise NotImplementedError

    def draw(self, masks: IntArray) -> None:
        """Nothing is masked."""

    def collect(self) -> Drawn | None:
        """The oldest launch's tokens."""
        return self._drawn.popleft() if self._drawn else None

    def close(self) -> None:
        """Nothing is held."""


def main() -> None:
    """Fill the engine, let it decode, time each part of each step."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--running", type=int, default=1024)
    arguments.add_argument("--waiting", type=int, default=4096)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--no-prefix-sharing", action="store_true")
    options = arguments.parse_args()
    more: dict[str, Any] = {"prefix_sharing": False} if options.no_prefix_sharing else {}
    engine = Engine(
        NoRunner(options.running), text_stream=NoText, eos_ids=frozenset(), token_budget=16384,
        context_length=PROMPT + ANSWER + 1, max_sequences=options.running, **more,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = GenerationParams(max_tokens=ANSWER, temperature=0.7, ignore_eos=True)
    for number in range(options.running + options.waiting):
        prompt = tuple(rng.integers(0, VOCAB, PROMPT).tolist())
        engine.submit(Request(str(number), 1, prompt, params, number))
    while engine.stats.generated_tokens < 8 * options.running:  # until every prompt is computed
        engine.step()
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*given: Any) -> Any:
            began = time.perf_counter()
            result = call(*given)
            seconds[name].append(time.perf_counter() - began)
            return result

        return timing

    engine._scheduler.plan = timed("plan", engine._scheduler.plan)  # type: ignore[method-assign]
    engine._builder.build = timed("build", engine._builder.build)  # type: ignore[method-assign]
    engine._apply = timed("apply", engine._apply)  # type: ignore[method-assign]
    step = timed("step", engine.step)
    for _ in range(options.steps):
        assert step() == []
    figures = {"running": engine.running, "waiting": engine.waiting, "steps": options.steps}
    for name, values in seconds.items():
        figures[f"{name}_ms"] = round(1000 * statistics.median(values), 3)
        figures[f"{name}_worst_ms"] = round(1000 * max(values), 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
