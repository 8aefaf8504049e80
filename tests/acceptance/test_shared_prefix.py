"""Rows with one system prompt, on the reference runner: computed once, the texts as if each were alone."""

from pathlib import Path

import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.assembly.sizes import PAGE_SIZE
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.model.chat import ChatTemplate
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.engines import complete
from tests.support.ggufs import write_model
from tools.demo_model.corpus import held_out_pairs

KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
]


class Model:
    """A model file, and what it generates for requests that all arrive at once."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile.open(path)
        self.spec = read_spec(self.file)
        self.tokenizer = Tokenizer.from_gguf(self.file)

    def generate(
        self, requests: list[Request], *, sharing: bool, slots: int, pages: int
    ) -> tuple[dict[str, Completion], EngineStats]:
        runner = ReferenceRunner(
            self.file, self.spec, kv_pages=pages, page_size=PAGE_SIZE, slots=slots, depth=2
        )
        engine = Engine(
            runner,
            Detokenizer(
                text_stream=lambda: self.tokenizer.stream(continues=True), eos_ids=self.tokenizer.eos_ids
            ),
            EngineSizes(context_length=self.spec.context_length, max_sequences=slots, token_budget=512),
            prefix_sharing=sharing,
        )
        done = complete(engine, requests, check=False)
        engine.check_integrity()
        assert all(completion.error is None for completion in done.values())
        return done, engine.stats


@pytest.mark.slow  # the one beside it shares pages, too
def test_256_rows_with_a_system_prompt_of_1000_tokens(tmp_path: Path) -> None:
    model = Model(
        write_model(tmp_path / "m.gguf", layers=1, width=32, ffn=64, heads=2, kv_heads=1, context_length=2048)
    )
    encode = model.tokenizer.encode
    system = encode(" ".join(f"rule {n}: count the night mill and say hello" for n in range(90)))[:1000]
    assert len(system) == 1000
    requests = [
        Request(
            f"j{n}", 1, (*system, *encode(f" user {n} says {n * n}")),
            GenerationParams.parse({"max_tokens": 8, "ignore_eos": True, **KINDS[n % 3]}), seed=n,
        )
        for n in range(256)
    ]  # fmt: skip
    with_sharing, shared = model.generate(requests, sharing=True, slots=64, pages=1024)
    without, alone = model.generate(requests, sharing=False, slots=64, pages=64 * 80)
    assert with_sharing == without
    assert len({completion.text for completion in without.values()}) > 100
    total = sum(len(request.prompt_ids) for request in requests)
    assert alone.prompt_tokens == total
    assert shared.prompt_tokens + shared.shared_tokens == total
    assert shared.prompt_tokens * 5 < alone.prompt_tokens
    print(f"prompt tokens computed: {alone.prompt_tokens:,} without, {shared.prompt_tokens:,} with sharing")  # noqa: T201


def test_haiku_for_one_long_system_prompt_are_the_same_with_sharing_and_preemption() -> None:
    model = Model(demo_model())
    chat = ChatTemplate.from_gguf(model.file, model.tokenizer)
    style = "Write as Basho would. " * 12
    asked = "Write a haiku about {} that contains the word {}"
    requests = [
        Request(
            f"j{n}", 1,
            tuple(
                chat.encode(
                    [
                        {"role": "system", "content": style},
                        {"role": "user", "content": asked.format(*pair)},
                    ]
                )
            ),
            GenerationParams.parse({"max_tokens": 24, "stop": ["\n\n"], **KINDS[n % 3]}), seed=n,
        )
        for n, pair in enumerate(held_out_pairs(24, seed=5))
    ]  # fmt: skip
    with_sharing, shared = model.generate(requests, sharing=True, slots=16, pages=400)
    tight, preempting = model.generate(requests, sharing=True, slots=16, pages=26)
    without, alone = model.generate(requests, sharing=False, slots=16, pages=400)
    assert with_sharing == tight == without
    assert preempting.preemptions > 0
    assert shared.prompt_tokens * 3 < alone.prompt_tokens
