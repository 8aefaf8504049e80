"""The CUDA runner with shared pages: fewer prompt tokens computed, and the same tokens drawn."""

from contextlib import closing

import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.support.cuda_runners import cuda_runner
from tests.support.engines import NoText

CONTEXT = 512
ROWS = 64
GREEDY = {"temperature": 0.0}
WARM = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}


def generate(
    requests: list[Request], *, sharing: bool, pages: int, depth: int
) -> tuple[dict[str, tuple[int, ...]], EngineStats]:
    file = GgufFile.open(demo_model())
    runner = cuda_runner(
        file, read_spec(file), slots=32, kv_pages=pages, max_tokens=1024, context=CONTEXT,
        tune=False, depth=depth,
    )  # fmt: skip
    with closing(runner):
        engine = Engine(
            runner,
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(context_length=CONTEXT, max_sequences=32, token_budget=1024),
            prefix_sharing=sharing,
        )
        for request in requests:
            engine.submit(request)
        tokens = {}
        while engine.has_work:
            tokens |= {done.job_id: done.token_ids for done in engine.step()}
            engine.check_integrity()
        return tokens, engine.stats


@pytest.mark.parametrize("depth", [1, 3])
def test_sharing_computes_less_and_changes_no_token(depth: int) -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(demo_model()))
    system = tokenizer.encode("Write a haiku about the winter moon and the river. " * 30)[:256]
    requests = [
        Request(
            f"j{n}", 1, (*system, *tokenizer.encode(f" Haiku {n * 7}")),
            GenerationParams.parse({"max_tokens": 40, "ignore_eos": True} | (GREEDY if n % 2 else WARM)), n,
        )
        for n in range(ROWS)
    ]  # fmt: skip
    with_sharing, shared = generate(requests, sharing=True, pages=32 * 32, depth=depth)
    without, alone = generate(requests, sharing=False, pages=32 * 32, depth=depth)
    tight, preempting = generate(requests, sharing=True, pages=60, depth=depth)
    assert with_sharing == without
    assert preempting.preemptions > 0
    assert tight == without
    assert shared.shared_tokens == (ROWS - 1) * 256
    assert shared.prompt_tokens * 5 < alone.prompt_tokens
