"""A service on an engine (in a thread) whose runner does as a test says."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from nightmill.jobs.base.contract import Markup
from nightmill.jobs.client.client import Client
from nightmill.jobs.errors import ChatTemplateError, InvalidParameterError, NightmillError, RunnerError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Claim, Claims
from nightmill.jobs.sql.jobs import Selection
from nightmill.jobs.sql.sweep import Sweep
from nightmill.jobs.streams.redis import Followers
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.metering import Metering
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import ClosingTokens
from nightmill.worker.runners.base import StepBatch
from nightmill.worker.runners.gpu.device.nvml import GpuProbe
from nightmill.worker.service.service_options import ServiceOptions
from nightmill.worker.service.shards import Service
from nightmill.worker.service.suspects import SuspectsTurn
from tests.support.nvml import FakeNvml
from tests.unit.engine.by_definition import EOS, PIECES, PieceStream
from tests.unit.engine.scripted import ScriptedRunner
from tests.unit.worker.threads import engine_in_thread

PROMPT = (1, 2, 3)


class Faulty(ScriptedRunner):
    """Raises at a launch once it is told to."""

    broken = False

    def launch(self, batch: StepBatch) -> None:
        if self.broken:
            raise RunnerError("the arithmetic gave out")
        super().launch(batch)


class Gated(ScriptedRunner):
    """Launches only while its gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()

    def launch(self, batch: StepBatch) -> None:
        assert self.gate.wait(240)
        super().launch(batch)


class Pausing(Gated):
    """Stops before its launch number `pause_at` until the gate is open."""

    pause_at = 40

    def launch(self, batch: StepBatch) -> None:
        if len(self.batches) >= self.pause_at:
            super().launch(batch)
        else:
            ScriptedRunner.launch(self, batch)


class ScriptedPrompting:
    """Tokenises every prompt as PROMPT, and spells tokens by the scripted runner's pieces."""

    pooling: str | None = None
    """What the model's file says."""

    def tokenize_all(self, claims: Sequence[Claim]) -> list[tuple[int, ...] | NightmillError]:
        return [self.encode(claim) for claim in claims]

    @staticmethod
    def encode(claim: Claim) -> tuple[int, ...] | NightmillError:
        return ChatTemplateError("the template refuses") if claim.prompt == "unspeakable" else PROMPT

    def tokenize_texts(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ord(letter) % EOS for letter in text) for text in texts)

    def tokenize_banned(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(map(ord, word)) for word in words)

    def spell_token(self, token_id: int) -> tuple[bytes, str]:
        return PIECES[token_id], f"<{token_id}>"

    def embedded(self, params: GenerationParams, tokens: int) -> range:
        pooling = params.pooling or self.pooling
        if pooling is None:
            raise InvalidParameterError("pooling: no file says any", field="pooling")
        return range(0 if pooling == "mean" else tokens - 1, tokens)

    def paired(self, prompt_ids: tuple[int, ...]) -> tuple[range, int] | None:
        return None

    def markup(self, claim: Claim, prompt_ids: tuple[int, ...]) -> Markup | None:
        return None

    def closing(self, markup: Markup, *, calls: bool) -> ClosingTokens:
        return ClosingTokens((0,), (1, 0))


class Bench:
    """A service on a client's database, and what became of it."""

    def __init__(
        self,
        client: Client,
        runner: ScriptedRunner,
        capacity: int = 8,
        reserved_slots: int = 0,
        name: str = "a",
    ) -> None:
        self.client = client
        self.runner = runner
        self.claims = Claims(client.database, name * 32)
        self.claims.register("host", 1, "model", None)
        self.fatal: list[str] = []
        self.prompting = ScriptedPrompting()
        nvml = FakeNvml()
        self.engine = Engine(
            runner,
            Detokenizer(text_stream=PieceStream, eos_ids=frozenset({EOS})),
            EngineSizes(context_length=200, max_sequences=runner.slots, token_budget=64),
            metering=Metering(GpuProbe(0, lambda name: nvml), time.monotonic),
        )
        self.service = Service(
            self.claims,
            engine_in_thread(lambda: self.engine),
            self.prompting,
            ServiceOptions(capacity=capacity, reserved_slots=reserved_slots, drain_seconds=5.0),
            followers=Followers(client.broker),
            on_fatal=self.fatal.append,
        )
        self.sweep = Sweep(client.database)
        self.suspects = SuspectsTurn(
            self.claims, self.service, (None, "model"), patience=0.0, announce=self.announce
        )

    def announce(self) -> None:
        for item in self.sweep.unsent(100):
            self.client.broker.announce(item.job_ids, item.model, item.priority)

    def run(self, job_ids: list[str]) -> threading.Thread:
        thread = threading.Thread(target=self.service.run_shard, args=(job_ids,), daemon=True)
        thread.start()
        return thread


def stop(bench: Bench) -> None:
    bench.service.drain_seconds = 0.0
    bench.service.drain()
    bench.service.close()


def enqueue(client: Client, count: int, **settings: Any) -> list[str]:
    return list(client.enqueue_many(["prompt"] * count, **settings))


def these(ids: list[str]) -> Selection:
    return Selection(ids=ids)
