"""Engines in this process: all of some requests at once, and no text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.drafting import Drafts
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import Runner
from nightmill.worker.runners.reference import ReferenceRunner

__all__ = ["Bits", "NoText", "bits", "complete", "engine_of", "greedy", "mixed_requests"]

Bits = dict[str, tuple[tuple[int, ...], bytes]]
"""Tokens and records of logprobs of texts, by job id."""
_WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.9, "repetition_penalty": 1.2}, {"top_k": 20, "logprobs": 3},
)  # fmt: skip


class NoText:
    """A stream for who looks at tokens only."""

    def push(self, token_id: int) -> str:
        return ""

    @property
    def whole(self) -> bool:
        return True

    def flush(self) -> str:
        return ""


def complete(engine: Engine, requests: Sequence[Request], *, check: bool = True) -> dict[str, Completion]:
    """What becomes of all requests at once, by job id; `check`: audit the engine after each step."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.job_id: completion for completion in engine.step()}
        if check:
            engine.check_integrity()
    return done


def engine_of(
    runner: Runner, context: int, *, budget: int = 1000, sequences: int | None = None, sharing: bool = True,
    drafts: Drafts = Drafts.OFF,
) -> Engine:  # fmt: skip
    """An engine under these limits, without text; as many sequences as the runner has slots by default."""
    return Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context, max_sequences=sequences or runner.slots, token_budget=budget),
        prefix_sharing=sharing,
        drafts=drafts,
    )


def mixed_requests(count: int, common: Sequence[int], *, tokens: int = 12) -> list[Request]:
    """Requests of random bytes that begin in turn with so many tokens; greedy, drawn, and with logprobs."""
    beginning = np.random.default_rng(1).integers(0, 256, max(common)).tolist()
    requests = []
    for n in range(count):
        rng = np.random.default_rng(n)
        own = rng.integers(0, 256, int(rng.integers(1, 90))).tolist()
        params = GenerationParams.parse({"max_tokens": tokens, "ignore_eos": True} | _WISHES[n % 3])
        prompt = (*beginning[: common[n % len(common)]], *own)
        requests.append(Request(f"j{n}", 1, prompt, params, seed=n))
    return requests


def bits(done: Mapping[str, Completion]) -> Bits:
    """What two schedules must have in common."""
    return {
        job: (one.token_ids, b"" if one.logprobs is None else one.logprobs.records)
        for job, one in done.items()
    }


def greedy(
    file: GgufFile, spec: ModelSpec, prompt: list[int], tokens: int
) -> tuple[tuple[int, ...], npt.NDArray[np.float32]]:
    """The likeliest tokens after a prompt, and the logits of the first."""
    rows: list[npt.NDArray[np.float32]] = []
    runner = ReferenceRunner(
        file, spec, kv_pages=64, slots=1,
        trace=lambda stage, values: rows.append(values.copy()) if stage == "logits" else None,
    )  # fmt: skip
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=256, max_sequences=1, token_budget=70),
    )
    params = GenerationParams(max_tokens=tokens, temperature=0.0)
    done = complete(engine, [Request("j", 1, tuple(prompt), params, seed=0)])
    return done["j"].token_ids, rows[0][0]
