"""Model files for the reference runner, requests of all kinds, and short ways to run them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import Admission, StepBatch, make_draws
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.engines import NoText, complete
from tests.support.ggufs import byte_vocabulary, write_model, write_spec
from tests.support.one_by_one import OneByOne
from tests.support.specs import GEMMAS, HYBRIDS, MIXTURES, VARIANTS

Array = npt.NDArray[np.float32]
VOCAB = len(byte_vocabulary().tokens)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2-seven-to-one": {"heads": 7, "kv_heads": 1, "width": 56, "tied": False},
    "qwen2-fourteen-to-two": {"heads": 14, "kv_heads": 2, "width": 56, "tied": False},
    "llama": {"architecture": "llama", "heads": 4, "kv_heads": 4, "tied": False},
    "llama3": {"architecture": "llama", "rope_freqs": np.linspace(1, 8, 8), "heads": 4},
    "qwen3": {"architecture": "qwen3", "heads": 4, "kv_heads": 2, "head_dim": 24, "ffn": 200},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_context_length": 64}},
}


class Bench:
    """A model file and short ways to run it."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self.file, self.spec = file, spec

    def runner(self, *, kv_pages: int = 64, slots: int = 4, **options: Any) -> ReferenceRunner:
        return ReferenceRunner(self.file, self.spec, kv_pages=kv_pages, slots=slots, **options)

    def generate(
        self, requests: list[Request], *, budget: int = 512, at_once: int | None = None, **options: Any
    ) -> dict[str, Completion]:
        runner = self.runner(**options)
        engine = Engine(
            runner,
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(
                context_length=self.spec.context_length,
                max_sequences=at_once or runner.slots,
                token_budget=max(budget, at_once or 1),
            ),
            constraints=OneByOne(),
        )
        done = complete(engine, requests)
        assert all(completion.error is None for completion in done.values())
        self.stats = engine.stats
        return done

    def logits(self, prompt: list[int], answer: int = 5, **options: Any) -> tuple[tuple[int, ...], Array]:
        """A greedy answer and the logits each of its tokens was chosen from."""
        rows: list[Array] = []

        def keep(stage: str, values: Array) -> None:
            if stage == "logits":
                rows.append(values.copy())

        done = self.generate(
            [request("j", prompt, max_tokens=answer, temperature=0.0)], at_once=1, trace=keep, **options
        )
        return done["j"].token_ids, np.concatenate(rows)


MakeBench = Callable[..., Bench]


def request(job_id: str, prompt: list[int], *, seed: int = 0, priority: int = 5, **params: Any) -> Request:
    return Request(job_id, 1, tuple(prompt), GenerationParams.parse(params), seed, None, priority)


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def mixed_requests(count: int, **more: Any) -> list[Request]:
    """Requests of many lengths and all kinds of sampling."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {}, {"top_k": 20, "temperature": 0.8}, {"top_p": 0.9},
        {"repetition_penalty": 1.3}, {"min_p": 0.05, "repetition_penalty": 0.9},
    ]  # fmt: skip
    params = [{"max_tokens": 10 + n % 7} | kinds[n % 6] | more for n in range(count)]
    return [request(f"j{n}", random_prompt(n, 1 + n * 37 % 90), seed=n, **params[n]) for n in range(count)]


def one_token_batch(tokens: list[int]) -> StepBatch:
    def ints(*values: int) -> npt.NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    return StepBatch(
        tokens=ints(*tokens), positions=ints(0), cache_rows=ints(0), sequence_starts=ints(0, 1),
        context_lengths=ints(1), page_tables=ints(0)[None], slots=ints(0),
        draws=make_draws(ints(0), ints(0), ints(1)), drawn=0,
        admissions=(Admission(0, tuple(tokens), GenerationParams(), 0),),
    )  # fmt: skip


def bench_maker(folder: Path) -> MakeBench:
    """Make benches of models by name, with files in this folder."""

    def make(name: str = "qwen2", **options: Any) -> Bench:
        path = folder / f"{name}-{len(list(folder.iterdir()))}.gguf"
        if (spec := (VARIANTS | HYBRIDS | MIXTURES | GEMMAS).get(name)) is not None:
            return Bench(GgufFile.open(write_spec(path, spec)), spec)
        file = GgufFile.open(write_model(path, **(MODELS[name] | options)))
        return Bench(file, read_spec(file))

    return make
