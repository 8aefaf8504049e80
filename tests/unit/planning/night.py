"""A runner of known speed, and the time by its own clock."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nightmill.jobs.base.contract import Prompt
from nightmill.worker.commands.planning.survey import Survey
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.limits import RequestLimits
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.runners.base import StepBatch
from tests.unit.engine.by_definition import EOS, PieceStream
from tests.unit.engine.scripted import ScriptedRunner

PER_STEP, PER_TOKEN = 0.01, 0.0005
SLOTS = 8
LIMITS = RequestLimits(vocab=EOS + 1, context=200, page_size=4, pages=8 * 50)


@dataclass(frozen=True)
class ByteReader:
    """Reads prompts by a function, texts to score as a token for each byte, and `<|x|>` as special tokens."""

    encode: Callable[..., tuple[int, ...]]
    vocab: int = 256

    def tokenize_texts(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(byte % self.vocab for byte in text.encode()) for text in texts)

    def marks_in(self, prompt: Prompt) -> set[str]:
        return set(re.findall(r"<\|[a-z]+\|>", prompt)) if isinstance(prompt, str) else set()

    def template_fault(self) -> str | None:
        return "the chat template writes <|x|>"


class TimedRunner(ScriptedRunner):
    """A launch takes PER_STEP seconds, and PER_TOKEN for each token of it."""

    now = 0.0

    def launch(self, batch: StepBatch) -> None:
        super().launch(batch)
        self.now += PER_STEP + PER_TOKEN * len(batch.tokens)
        self.batches.clear()

    def clock(self) -> float:
        return self.now


def timed_engine() -> tuple[TimedRunner, Engine]:
    runner = TimedRunner(kv_pages=LIMITS.pages or 0, page_size=LIMITS.page_size, slots=SLOTS)
    return runner, Engine(
        runner,
        Detokenizer(text_stream=PieceStream, eos_ids=frozenset({EOS})),
        EngineSizes(context_length=LIMITS.context, max_sequences=SLOTS, token_budget=64),
        clock=runner.clock,
    )


def time_of(requests: list[Request]) -> tuple[float, int]:
    """What the runner really takes for all of them: (seconds, tokens drawn)."""
    runner, engine = timed_engine()
    for request in requests:
        engine.submit(request)
    tokens = 0
    while engine.has_work:
        tokens += sum(completion.completion_tokens for completion in engine.step())
    return runner.now, tokens


def surveyed(requests: list[Request], sample: int) -> Survey:
    """A survey as it would come from a file of these requests."""
    found = Survey(rows=len(requests))
    for request in requests:
        found.prompt_tokens.append(len(request.prompt_ids))
        found.answers.append(1)
        found.limits.append(min(request.params.max_tokens, LIMITS.context - len(request.prompt_ids)))
        found.endless.append(request.params.ignore_eos)
    found.sample = random.Random(5).sample(requests, min(sample, len(requests)))
    return found
