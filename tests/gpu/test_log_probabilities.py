"""What the CUDA runner tells of drawn tokens and of prompts: as the reference, and the same in any batch."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.logprobs import Logprobs
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import Runner
from nightmill.worker.runners.reference import ReferenceRunner
from tests.gpu.conftest import Make
from tests.support.constraints import EveryNth
from tests.support.engines import NoText
from tests.support.one_by_one import OneByOne

CONTEXT = 256
LIKELY = 5


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return GgufFile.open(demo_model())


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return {"slots": 8, "kv_pages": 8 * 16, "max_tokens": 512, "tune": False, "context": CONTEXT}


def made(vocab: int) -> list[Request]:
    """Prompts with a common beginning, some told, answers of every kind."""
    rng = np.random.default_rng(3)
    common = rng.integers(0, vocab, 40).tolist()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 0.7, "logit_bias": {7: 2.0}},
        {"temperature": 0.0},
    ]
    return [
        Request(
            str(index), 1, (*common, *rng.integers(0, vocab, 3 + 7 * index).tolist()),
            GenerationParams(
                max_tokens=20, ignore_eos=True, logprobs=index % (LIKELY + 1), **kinds[index % 4]
            ),
            seed=index,
            prompt_logprobs_from=(None, 0, 40, 1)[index // 2 % 4],
            constraint=EveryNth(vocab, 5) if index % 4 == 3 else None,
        )
        for index in range(12)
    ]  # fmt: skip


def told(runner: Runner, requests: Sequence[Request]) -> dict[str, Logprobs]:
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=CONTEXT, max_sequences=runner.slots, token_budget=64),
        constraints=OneByOne(),
    )
    for request in requests:
        engine.submit(request)
    done = []
    while engine.has_work:
        done += engine.step()
        engine.check_integrity()
    assert [one.error for one in done] == [None] * len(requests)
    return {one.job_id: one.logprobs for one in done if one.logprobs is not None}


def words(one: Logprobs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities (T,), the likeliest tokens (T, N) and theirs."""
    records = np.frombuffer(one.records, dtype=np.float32).reshape(len(one.token_ids), 1 + 2 * one.likely)
    return records[:, 0], records[:, 1 : 1 + one.likely].view(np.int32), records[:, 1 + one.likely :]


def test_they_are_the_references_and_the_same_alone_and_in_a_batch(
    file: GgufFile, spec: ModelSpec, make: Make
) -> None:
    runner = make()
    together = told(runner, made(spec.vocab))
    for request in made(spec.vocab)[::3]:
        assert told(runner, [request])[request.job_id] == together[request.job_id]
    with closing(ReferenceRunner(file, spec, kv_pages=8 * 16, slots=8)) as reference:
        expected = told(reference, made(spec.vocab))
    assert together.keys() == expected.keys() == {str(index) for index in range(12)}
    compared = 0
    for name, theirs in expected.items():
        ours = together[name]
        pairs = list(zip(ours.token_ids, theirs.token_ids, strict=True))
        same = next((place for place, (left, right) in enumerate(pairs) if left != right), len(pairs))
        compared += same
        assert same > ours.given
        (own, ids, likely), (right, _, right_likely) = words(ours), words(theirs)
        np.testing.assert_allclose(own[:same], right[:same], rtol=5e-3, atol=5e-2)
        held = (ids[:same] >= 0) & np.isfinite(right_likely[:same])
        np.testing.assert_allclose(likely[:same][held], right_likely[:same][held], rtol=5e-3, atol=5e-2)
        if ours.likely:  # greedy: what was drawn is the likeliest
            drawn = slice(ours.given, None)
            np.testing.assert_array_equal(ids[drawn, 0], ours.token_ids[drawn])
            np.testing.assert_array_equal(likely[drawn, 0], own[drawn])
            assert (np.diff(likely[drawn], axis=1)[ids[drawn, 1:] >= 0] <= 0).all()
    print(f"{compared} of {sum(len(one.token_ids) for one in expected.values())} compared")  # noqa: T201
    assert compared > 300
