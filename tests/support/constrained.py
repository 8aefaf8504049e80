"""An engine on the reference runner whose requests are held to what they ask for."""

import time
from pathlib import Path
from typing import Any

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.spec import JobSpec
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.grammar import CheckerLimits, Grammars
from nightmill.worker.link.preparing import Preparing
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import TextStream
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.reference import ReferenceRunner

QUICK = CheckerLimits(seconds=2.0, wall_seconds=20.0)


class Constrained:
    """A model file, and what its requests become. Closes with the `with` block."""

    def __init__(self, path: Path, limits: CheckerLimits = QUICK) -> None:
        self.file = GgufFile.open(path)
        self.spec = read_spec(self.file)
        self.vocabulary = Vocabulary.from_gguf(self.file)
        self.vocabulary.spell_all()
        self.grammars = Grammars(self.vocabulary, self.spec.vocab, limits=limits, threads=2)
        self.slowest = 0.0  # seconds of a step

    def __enter__(self) -> "Constrained":
        return self

    def __exit__(self, *exc: object) -> None:
        self.grammars.close()

    def engine(self, *, slots: int = 32, kv_pages: int = 0, context: int = 0, depth: int = 1) -> Engine:
        context = min(context or self.spec.context_length, self.spec.context_length)
        return Engine(
            ReferenceRunner(
                self.file, self.spec, kv_pages=kv_pages or slots * context // 16, slots=slots, depth=depth
            ),
            Detokenizer(
                text_stream=lambda: TextStream(self.vocabulary, strip_space=False),
                eos_ids=self.vocabulary.eos_ids,
                decode=self.vocabulary.decode,
            ),
            EngineSizes(context_length=context, max_sequences=slots, token_budget=512),
            constraints=self.grammars,
        )

    def request(self, name: str, seed: int, asked: dict[str, Any], **params: Any) -> Request:
        constrained = JobSpec.parse({"prompt": "x", **asked}).constrained
        parsed = GenerationParams.parse(params)
        prompt = tuple((seed * 7 + place * 3) % 250 for place in range(1 + seed % 5))
        return Request(name, 1, prompt, parsed, seed, constrained=constrained)

    def run(
        self, requests: list[Request], engine: Engine | None = None, **options: Any
    ) -> dict[str, Completion]:
        """What becomes of the requests, which arrive together; audits the engine after each step."""
        engine = engine or self.engine(**options)
        preparing = Preparing(engine)
        for request in requests:
            preparing.submit(request)
        done: dict[str, Completion] = {}
        while engine.has_work or len(preparing):
            preparing.look()
            if not engine.has_work:
                time.sleep(0.001)
                continue
            began = time.monotonic()
            done |= {completion.job_id: completion for completion in engine.step()}
            self.slowest = max(self.slowest, time.monotonic() - began)
            engine.check_integrity()
        return done
